"""How tokens are laid out over ranks, and the padding of those that do not divide."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from jax_ep._src.core import compat
from jax_ep._src.core.primitive import warn_once
from jax_ep._src.layer.config import Axes, Config, spec_entry
from jax_ep._src.layer.router import LAYER


def token_spec(x: jax.Array, mesh: Mesh | AbstractMesh, axes: Axes) -> P | None:
    """Returns the spec of x [..., H] over the token axes; None if a dimension does not divide.

    Batch axes for which the first dimension is too small split the second one.
    """

    def divides(size: int, names: tuple[str, ...]) -> bool:
        return size % math.prod(mesh.shape[axis] for axis in names) == 0

    if x.ndim == 2:
        return P(spec_entry(axes.tokens)) if divides(x.shape[0], axes.tokens) else None
    for count in range(len(axes.batch), -1, -1):
        first, second = axes.batch[:count], (*axes.batch[count:], *axes.sequence)
        if divides(x.shape[0], first) and divides(x.shape[1], second):
            return P(spec_entry(first), spec_entry(second))
    return None


def warn_of_repeated_work(config: Config, mesh: Mesh | AbstractMesh, x: jax.Array) -> None:
    """Warns where x is known to be sharded over a mesh axis over which the layer gathers it."""
    axes, manual = config.axes_on(mesh), mesh.abstract_mesh.manual_axes
    for name in sorted(compat.known_axes(x).difference(axes.all, manual, compat.vmapped_axes())):
        if mesh.shape.get(name, 1) > 1:
            warn_once(
                f"{name} {config}",
                f"jax_ep.{LAYER}: x is sharded over mesh axis {name!r}, which is in none of the "
                f"layer's options: x is gathered over it, and its {mesh.shape[name]} ranks repeat "
                f"each other's work. Add {name!r} to batch_axes={config.batch_axes}, or leave "
                "batch_axes out, which splits tokens over every axis that no option names.",
            )


def flatten(x: jax.Array, token_mask: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
    """Returns [N, H], and bool[N] or None."""
    mask = None if token_mask is None else token_mask.reshape(-1).astype(jnp.bool_)
    return x.reshape(-1, x.shape[-1]), mask


def token_indices(axes: Axes, x: jax.Array, num_tokens: int) -> jax.Array:
    """Returns int32[num_tokens]: where the tokens of a rank's x [..., H] are among those of all.

    Padding, past the rank's last token, has index 0.
    """
    groups = (axes.batch, axes.sequence) if axes.sequence and x.ndim > 2 else (axes.tokens,)
    indices = jnp.zeros((), jnp.int32)
    for dim, size in enumerate(x.shape[:-1]):
        names = groups[dim] if dim < len(groups) else ()
        first: Any = 0
        total = size
        if names:
            first, total = lax.axis_index(names) * size, lax.axis_size(names) * size
        along = first + jnp.arange(size, dtype=jnp.int32)
        indices = jnp.add.outer(indices * total, along)
    return jnp.pad(indices.ravel(), (0, num_tokens - indices.size))


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


def pad_ids(topk_ids: jax.Array, num_tokens: int) -> jax.Array:
    """Adds ids of -1 to [N, K], for tokens that `pad` has added."""
    missing = num_tokens - topk_ids.shape[0]
    return jnp.pad(topk_ids, ((0, missing), (0, 0)), constant_values=-1)
