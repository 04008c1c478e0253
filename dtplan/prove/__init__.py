"""Worlds to run ranks in, and what is proved there about a plan."""
