"""Authoring: plans drafted from a model, and plans imported from other systems."""
