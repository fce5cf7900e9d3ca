"""``python -m jax_ep.bench COMMAND``: how fast jax_ep is beside its baselines, in one process.

Nothing of jax_ep imports this package. It needs the extra ``bench`` (rich and matplotlib).
"""
