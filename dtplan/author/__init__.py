"""Plans that are drafted: from a model's own data flow, or from another tool's plan."""
