"""The layer behind `jax_ep.nnx.MoE` and `jax_ep.linen.MoE`: its configuration, its mesh, its call and its router."""
