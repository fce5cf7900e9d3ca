"""Everything behind the public names of jax_ep; not an interface."""
