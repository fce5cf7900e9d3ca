"""Attention over keys of a cache, and rotary positions."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def attend(
    query: jax.Array, key: jax.Array, value: jax.Array, sees: jax.Array, sinks: jax.Array | None
) -> jax.Array:
    """Attends from queries [S, T, N, size] to keys and values [S, C, K, size].

    Each of the K heads serves N / K of the queries'. `sees` is bool[S, T, C]. Sinks [N], as in
    gpt-oss, take a share of each softmax. Returns [S, T, N * size].
    """
    batch_size, length, _, size = query.shape
    query = query.reshape(batch_size, length, key.shape[2], -1, size)
    scores = jnp.einsum("stkgd,sckd->skgtc", query, key, preferred_element_type=jnp.float32)
    lowest = jnp.finfo(jnp.float32).min
    scores = jnp.where(sees[:, None, None], scores * size**-0.5, lowest)
    if sinks is not None:
        column = sinks.astype(jnp.float32).reshape(1, *scores.shape[1:3], 1, 1)
        column = jnp.broadcast_to(column, (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, column], -1)
    shares = jax.nn.softmax(scores)[..., : key.shape[1]].astype(value.dtype)
    return jnp.einsum("skgtc,sckd->stkgd", shares, value).reshape(batch_size, length, -1)


def write(cache: jax.Array, new: jax.Array, positions: jax.Array) -> jax.Array:
    """Returns a cache [S, C, ...] with new rows [S, T, ...] at positions [S, T], -1 for none."""

    def of_slot(rows: jax.Array, new: jax.Array, at: jax.Array) -> jax.Array:
        return rows.at[at].set(new.astype(rows.dtype), mode="drop")

    # -1 would be the last row; those past it are dropped.
    at = jnp.where(positions < 0, cache.shape[1], positions)
    return jax.vmap(of_slot)(cache, new, at)


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary positions (arXiv:2104.09864), stretched by YaRN (arXiv:2309.00071) or not."""

    frequencies: np.ndarray
    scale: float

    def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """Rotates [S, T, heads, size] by positions [S, T], in float32."""
        angles = (positions[..., None] * self.frequencies)[:, :, None]
        cos, sin = jnp.cos(angles) * self.scale, jnp.sin(angles) * self.scale
        left, right = jnp.split(x.astype(jnp.float32), 2, -1)
        rotated = jnp.concatenate([left * cos - right * sin, left * sin + right * cos], -1)
        return rotated.astype(x.dtype)


def make_rope(config: dict[str, Any], size: int) -> Rope:
    """Returns the rotation that a config describes, in the words of transformers 5 or of 4."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = given.get("rope_theta") or config.get("rope_theta", 1e4)
    frequencies = theta ** (-np.arange(0, size, 2) / size)
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind == "default":
        return Rope(frequencies.astype(np.float32), 1.0)
    if kind != "yarn":
        raise ValueError(f"rotary positions of the kind {kind!r}; expected 'default' or 'yarn'.")
    factor = given["factor"]
    length = given.get("original_max_position_embeddings") or config["max_position_embeddings"]

    def index(turns: float) -> float:
        """The pair of dimensions that turns so often within the original length."""
        return size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = index(given.get("beta_fast") or 32), index(given.get("beta_slow") or 1)
    if given.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    slow = np.clip((np.arange(size // 2) - first) / max(last - first, 1e-3), 0, 1)
    frequencies *= slow / factor + 1 - slow
    scale = given.get("attention_factor") or 0.1 * math.log(factor) + 1
    return Rope(frequencies.astype(np.float32), scale)
