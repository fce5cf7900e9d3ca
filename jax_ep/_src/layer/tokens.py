"""How tokens are laid out over ranks, and the padding of those that do not divide."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from jax_ep._src.layer.config import Axes, spec_entry


def token_spec(x: jax.Array, mesh: Mesh | AbstractMesh, axes: Axes) -> P | None:
    """Returns the spec of x [..., H] over the token axes; None if a dimension does not divide."""
    if axes.sequence and x.ndim > 2:
        groups: tuple[tuple[str, ...], ...] = (axes.batch, axes.sequence)
    else:
        groups = (axes.tokens,)
    divides = all(
        size % math.prod(mesh.shape[axis] for axis in group) == 0
        for size, group in zip(x.shape, groups, strict=False)
    )
    return P(*map(spec_entry, groups)) if divides else None


def flatten(x: jax.Array, token_mask: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
    """Returns [N, H], and bool[N] or None."""
    mask = None if token_mask is None else token_mask.reshape(-1).astype(jnp.bool_)
    return x.reshape(-1, x.shape[-1]), mask


def some_token(tokens: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns one of [N, H] that is not masked, or ones.

    A shared expert takes masked tokens, too, and its activation may have no derivative at zero.
    """
    return jnp.where(mask.any(), tokens[jnp.argmax(mask)], 1)


def pad(
    tokens: jax.Array, token_mask: jax.Array | None, multiple: int
) -> tuple[jax.Array, jax.Array | None]:
    """Adds masked tokens of zeros to [N, H], until N is a multiple."""
    num_tokens = tokens.shape[0]
    missing = -num_tokens % multiple
    if not missing:
        return tokens, token_mask
    if token_mask is None:
        token_mask = jnp.ones(num_tokens, jnp.bool_)
    return jnp.pad(tokens, ((0, missing), (0, 0))), jnp.pad(token_mask, (0, missing))
