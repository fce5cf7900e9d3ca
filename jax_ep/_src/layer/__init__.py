"""The layer behind the modules `jax_ep.nnx.MoE` and `jax_ep.linen.MoE`."""
