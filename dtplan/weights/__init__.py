"""Hugging Face safetensors folders in and out of a sharded model: streaming load and sharded save."""
