"""`python -m jax_ep.doctor`: whether the CUDA kernels run on this machine, and if not, why."""
