"""The operations in plain JAX: the semantic oracle, and what runs where there is no kernel."""
