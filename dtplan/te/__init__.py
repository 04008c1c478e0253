"""TransformerEngine layers under a plan: which are exact for a model, and how they take the place of its modules."""
