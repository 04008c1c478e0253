"""Degrees, binding, application: from a plan and a model to the same model, sharded."""
