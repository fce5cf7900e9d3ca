"""Accumulates the gradients of matrices that several calls use, in float32, inside the kernels.

JAX makes one gradient per use of an array, each an array of its own in that array's dtype, and adds
them. Calls that share a matrix form a chain instead: each call takes a stand-in for an accumulator
and passes it on to the next call. The cotangent of what it passes on holds the gradients of all
later calls, and its kernel adds its own gradient in place.
"""

from __future__ import annotations

import enum
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jax_ep._src.core import compat
from jax_ep._src.core.errors import ArgumentError, DtypeError


class Accumulation(enum.Enum):
    """Says what a call does with the gradients of its matrices.

    The last call of a chain is the first in the backward pass.
    """

    NONE = "none"  # they are results, in the matrices' dtypes
    FIRST = "first"  # they become the accumulators
    NEXT = "next"  # they are added to the accumulators

    @property
    def passes_on(self) -> bool:
        """Whether the call returns its stand-ins, for a later call."""
        return self is Accumulation.NEXT

    def dtype(self, matrix: jax.Array) -> Any:
        """The dtype of the gradient of `matrix`."""
        return matrix.dtype if self is Accumulation.NONE else jnp.dtype(jnp.float32)


class Accumulators(NamedTuple):
    """Stand-ins in the forward pass, whose cotangents are float32 accumulators; None: no chain.

    They have the shapes of the kernels' operands, because XLA copies a carry that a loop reshapes.
    """

    w_up: jax.Array | None
    w_down: jax.Array | None


NO_ACCUMULATORS = Accumulators(None, None)


def pass_on[Tree](accumulators: Tree, result: jax.Array) -> Tree:
    """Returns the accumulators. Under vmap they are mapped if `result`, of the same call, is.

    Otherwise all elements of the batch would get one cotangent, the sum of what later calls of all
    of them add, and each would add its gradient to that.
    """
    return jax.tree.map(lambda accumulator: _pass_on_p.bind(accumulator, result), accumulators)


def _map_accumulator(operands: Any, dims: Any) -> Any:
    accumulator, result = operands
    if dims[0] is not None:
        return accumulator, dims[0]
    axes = compat.vmapped_manual_axes() & compat.varying_axes(result)
    accumulator = compat.vary_over(accumulator, axes)
    return compat.broadcast_over(accumulator, result, dims[1]), 0


_pass_on_p = Primitive("jax_ep.pass_on")
_pass_on_p.def_impl(lambda accumulator, _: accumulator)
_pass_on_p.def_abstract_eval(lambda accumulator, _: accumulator)
mlir.register_lowering(_pass_on_p, lambda _, accumulator, __: [accumulator])
batching.primitive_batchers[_pass_on_p] = _map_accumulator


def stand_in(matrix: jax.Array) -> jax.Array:
    """Returns the stand-in for the accumulator of `matrix`: zeros, which XLA removes as unused.

    Its cotangent, cast to the matrix's dtype, is the gradient of `matrix`.
    """
    return _stand_in(matrix, jnp.dtype(matrix.dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _stand_in(matrix: jax.Array, dtype: Any) -> jax.Array:
    zeros = compat.vary_over(jnp.zeros(matrix.shape, jnp.float32), compat.varying_axes(matrix))
    return pass_on(zeros, matrix)


def _forward(matrix: jax.Array, dtype: Any) -> tuple[jax.Array, None]:
    return _stand_in(matrix, dtype), None


def _backward(dtype: Any, _: None, accumulator: jax.Array) -> tuple[jax.Array]:
    return (accumulator.astype(dtype),)


_stand_in.defvjp(_forward, _backward)


# ---- chains of the user's own calls


def accumulators(
    w_up: jax.Array, w_down: jax.Array, *, like: jax.Array | None = None
) -> Accumulators:
    """Starts a chain of `moe_mlp` calls that add their gradients of w_up and w_down in place.

    Without a chain each call has gradients of its own, which JAX adds and which, for a stack of
    layers, have the size of the whole stack. In a chain every call takes what the call before
    returned, as the carry of a scan does::

        def block(carry, layer):
            x, sums = carry
            y, _, sums = jax_ep.moe_mlp(
                x, ids, weights, w_up, w_down, layer=layer, accumulators=sums, axis_name="expert"
            )
            return (x + y, sums), None

        sums = jax_ep.accumulators(w_up, w_down, like=x)
        (x, _), _ = jax.lax.scan(block, (x, sums), jnp.arange(num_layers))

    In the forward pass the arrays are zeros that nothing reads, and XLA removes them. In the
    backward pass they are float32 sums to which the kernels add. Cast to the dtype of w_up and
    w_down, the sums are the gradients.

    Args:
      w_up: as the calls get it, or the float32 master of what they get; one array, not a (gate, up)
        pair.
      w_down: likewise.
      like: an array that varies over the same mesh axes as the tokens. Inside `shard_map` the sums
        of all layers are then summed once over the axes that the matrices lack.

    Returns:
      The `accumulators` that `moe_mlp` takes and returns.

    Raises:
      ArgumentError (a ValueError): shapes that do not fit each other.
      DtypeError (a TypeError): w_up or w_down is not an array.
    """
    for name, matrix in ("w_up", w_up), ("w_down", w_down):
        if not hasattr(matrix, "dtype"):
            raise DtypeError(
                f"jax_ep.accumulators: {name} is a {type(matrix).__name__}; expected an array. "
                "Give gate and up as one array, [..., 2, F]."
            )
    axes = frozenset() if like is None else compat.varying_axes(like)
    lead = w_down.shape[:-2]
    fits = w_down.ndim > 2 and w_up.shape[: len(lead) + 1] == (*lead, *w_down.shape[-1:])
    if not fits or w_up.ndim < w_down.ndim:
        raise ArgumentError(
            f"jax_ep.accumulators: w_up has shape {w_up.shape} and w_down {w_down.shape}; expected "
            "[..., H, 2, F], [..., H, 2F] or [..., H, F], and [..., F, H]. Give the matrices of "
            "the same experts."
        )
    num_groups, hidden = math.prod(lead), w_down.shape[-1]
    up = w_up.reshape(num_groups, hidden, w_up.size // (num_groups * hidden))
    down = w_down.reshape(num_groups, -1, hidden)
    return compat.vary_together(Accumulators(stand_in(up), stand_in(down)), axes)
