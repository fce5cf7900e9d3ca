"""Checks of arrays: their shapes and dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep._src.core.checks.values import dtype
from jax_ep._src.core.errors import ArgumentError, DtypeError

ROW_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
INT32 = np.iinfo(np.int32)


def array(operation: str, name: str, value: Any) -> None:
    """Raises if `value` has no shape and dtype.

    A type of jax_ep's own that is no array has the advice as `instead_of_array`.
    """
    if not (hasattr(value, "shape") and hasattr(value, "dtype")):
        advice = getattr(value, "instead_of_array", f"Convert it with jnp.asarray({name}).")
        raise DtypeError(
            f"jax_ep.{operation}: {name} is a {type(value).__name__}; expected an array. {advice}"
        )


def shape(operation: str, name: str, value: jax.Array, expected: tuple[int | str, ...]) -> None:
    """Compares with `expected`, in which a string stands for any size and is its name."""
    array(operation, name, value)
    known_sizes(operation, name, value, value.shape)
    fits = len(value.shape) == len(expected) and all(
        isinstance(want, str) or want == have
        for have, want in zip(value.shape, expected, strict=True)
    )
    if not fits:
        wanted = ", ".join(str(size) for size in expected)
        raise ArgumentError(
            f"jax_ep.{operation}: {name} has shape {value.shape}; expected [{wanted}]. "
            "Inside shard_map these are the shapes of one rank."
        )


def known_sizes(operation: str, name: str, value: jax.Array, sizes: Sequence[Any]) -> None:
    """Raises if one of these sizes of `value` is symbolic."""
    if any(jax.export.is_symbolic_dim(size) for size in sizes):
        raise ArgumentError(
            f"jax_ep.{operation}: {name} has shape {value.shape}, which is symbolic; expected "
            "sizes that are known while tracing. Export once for each size, and pad to the next."
        )


def rows(operation: str, name: str, value: jax.Array, expected: tuple[int | str, ...]) -> None:
    """Raises if these are not rows of one of the dtypes that rows can have."""
    shape(operation, name, value, expected)
    if value.dtype not in ROW_DTYPES:
        dtypes = ", ".join(str(jnp.dtype(d)) for d in ROW_DTYPES)
        raise DtypeError(
            f"jax_ep.{operation}: {name} has dtype {value.dtype}; expected one of {dtypes}. "
            f"Cast it with {name}.astype(...)."
        )


def weights(
    operation: str, name: str, value: jax.Array, expected: tuple[int | str, ...]
) -> jax.Array:
    """Weights of any float dtype as float32."""
    shape(operation, name, value, expected)
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise DtypeError(
            f"jax_ep.{operation}: {name} has dtype {value.dtype}; expected a float dtype. "
            f"Cast it with {name}.astype(jnp.float32)."
        )
    return value.astype(jnp.float32)


def topk_ids(operation: str, topk_ids: jax.Array, num_tokens: int) -> None:
    """Raises if these are not the experts of so many tokens."""
    shape(operation, "topk_ids", topk_ids, (num_tokens, "top_k"))
    if topk_ids.shape[1] < 1:
        raise ArgumentError(
            f"jax_ep.{operation}: topk_ids has shape {topk_ids.shape}; expected at least one "
            "expert per token. Mark tokens that have none by an id of -1."
        )
    ids_dtype(operation, topk_ids)


def ids_dtype(operation: str, topk_ids: jax.Array) -> None:
    """Raises unless the ids are int32."""
    if topk_ids.dtype != jnp.int32:
        raise DtypeError(
            f"jax_ep.{operation}: topk_ids has dtype {topk_ids.dtype}; expected int32. "
            "Cast it with topk_ids.astype(jnp.int32)."
        )


def group_sizes(
    operation: str, group_sizes: jax.Array, num_groups: int | str = "groups"
) -> jax.Array:
    """Sizes of any integer dtype as int32; what does not fit is clipped, never wrapped."""
    shape(operation, "group_sizes", group_sizes, (num_groups,))
    if group_sizes.shape[0] < 1:
        raise ArgumentError(
            f"jax_ep.{operation}: group_sizes has shape {group_sizes.shape}; expected at least "
            "one group. Give one size for each matrix."
        )
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise DtypeError(
            f"jax_ep.{operation}: group_sizes has dtype {group_sizes.dtype}; expected an integer "
            "dtype. Cast it with group_sizes.astype(jnp.int32)."
        )
    bounds = jnp.iinfo(group_sizes.dtype)
    if bounds.max > INT32.max:
        # jax.numpy would wrap a numpy array of 64 bits before it clips it.
        clip = np.clip if isinstance(group_sizes, np.ndarray) else jnp.clip
        low, high = max(bounds.min, INT32.min), INT32.max
        group_sizes = clip(group_sizes, *np.array([low, high], group_sizes.dtype))
    return group_sizes.astype(jnp.int32)


def matrix_dtype(
    operation: str, name: str, matrix: jax.Array, rows_name: str, rows: jax.Array
) -> None:
    """Raises if `rows` cannot be multiplied by `matrix`."""
    if matrix.dtype not in (rows.dtype, jnp.float32):
        raise DtypeError(
            f"jax_ep.{operation}: {name} has dtype {matrix.dtype} and {rows_name} {rows.dtype}; "
            f"expected {name} in {rows_name}'s dtype or float32. Cast it with "
            f"{name}.astype({rows.dtype})."
        )


def out_dtype(operation: str, lhs: jax.Array, preferred_element_type: Any) -> np.dtype[Any]:
    """The dtype of a product's result."""
    wanted = lhs.dtype if preferred_element_type is None else preferred_element_type
    result = dtype(operation, "preferred_element_type", wanted)
    if result not in (lhs.dtype, jnp.float32):
        expected = " or ".join(dict.fromkeys((str(lhs.dtype), "float32")))
        raise DtypeError(
            f"jax_ep.{operation}: preferred_element_type={result} with lhs in {lhs.dtype}; "
            f"expected {expected}. Cast the result instead."
        )
    return result


def accumulator(
    operation: str,
    accumulator: jax.Array,
    expected: tuple[int, ...],
    preferred_element_type: Any,
) -> None:
    """Raises if a result of shape `expected` cannot be added to it."""
    shape(operation, "accumulator", accumulator, expected)
    if accumulator.dtype != jnp.float32:
        raise DtypeError(
            f"jax_ep.{operation}: accumulator has dtype {accumulator.dtype}; expected float32. "
            "Cast it with accumulator.astype(jnp.float32)."
        )
    if preferred_element_type is not None and jnp.dtype(preferred_element_type) != jnp.float32:
        raise DtypeError(
            f"jax_ep.{operation}: preferred_element_type={jnp.dtype(preferred_element_type)} with "
            "an accumulator; expected float32 or None. Cast the result instead."
        )
