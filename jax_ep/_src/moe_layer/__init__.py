"""The layer behind `jax_ep.nnx.MoE`: its configuration, its mesh, its call and its router."""
