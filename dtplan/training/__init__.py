"""Training checkpoints on torch's distributed checkpoint: saved at one degree, resumed at any other."""
