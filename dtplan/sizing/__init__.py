"""How large, how long: what a step on some degrees holds in memory, and an estimate of its time."""
