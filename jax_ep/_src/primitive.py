"""What all primitives share: the choice of implementation, the custom call, the batching rule."""

from __future__ import annotations

import functools
import string
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jax_ep._src import compat, runtime
from jax_ep._src.errors import ArgumentError, DtypeError, UnavailableError

ROW_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
MAX_ITEMS = 2**30
"""Rows, choices or experts that the kernels take: they count them in 32 bits."""


def define_primitive(
    operation: str,
    *,
    abstract_eval: Callable[..., Sequence[compat.Aval]],
    reference: Callable[..., Sequence[jax.Array]],
    attributes: Callable[..., dict[str, Any]],
    unsupported: Callable[..., str | None],
) -> Primitive:
    """A primitive that lowers to the custom call ``jax_ep.<operation>.v1`` or to `reference`.

    Every primitive has one parameter ``params`` with an ``implementation`` in it, and may have
    flags beside it.

    Args:
      operation: its name.
      abstract_eval: (*avals, **parameters) -> avals of the results.
      reference: (*operands, **parameters) -> results, in plain JAX.
      attributes: (avals, **parameters) -> attributes of the custom call.
      unsupported: (avals, **parameters) -> why the kernels do not cover these, or None.
    """
    primitive = Primitive(f"jax_ep.{operation}")
    primitive.multiple_results = True
    target = f"jax_ep.{operation}.v1"

    def checked_abstract_eval(*avals: compat.Aval, **params: Any) -> Sequence[compat.Aval]:
        _refuse_explicit_sharding(operation, avals)
        return abstract_eval(*avals, **params)

    def lower_reference(ctx: Any, *operands: Any, **params: Any) -> Any:
        # The user's settings are for the user's code.
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            return mlir.lower_fun(reference, multiple_results=True)(ctx, *operands, **params)

    def lower_anywhere(ctx: Any, *operands: Any, **params: Any) -> Any:
        if params["params"].implementation == "cuda":
            raise UnavailableError(
                f"jax_ep.{operation}: implementation='cuda' was asked for, but this is lowered for "
                f"{'/'.join(ctx.module_context.platforms)}. Use implementation=None, which runs "
                "the pure-JAX implementation there."
            )
        return lower_reference(ctx, *operands, **params)

    def lower_cuda(ctx: Any, *operands: Any, **params: Any) -> Any:
        implementation = params["params"].implementation
        if implementation == "xla":
            return lower_reference(ctx, *operands, **params)
        reason = _no_cuda_build() or unsupported(ctx.avals_in, **params)
        if reason is None:
            return _lower_custom_call(target, ctx, operands, attributes(ctx.avals_in, **params))
        if implementation == "cuda":
            raise UnavailableError(
                f"jax_ep.{operation}: implementation='cuda' was asked for, but {reason}. "
                "Use implementation=None or 'xla' for the pure-JAX implementation."
            )
        _warn_once(f"jax_ep.{operation} runs the pure-JAX implementation: {reason}.")
        return lower_reference(ctx, *operands, **params)

    @functools.cache
    def compiled(**params: Any) -> Any:
        return jax.jit(functools.partial(primitive.bind, **params))

    primitive.def_impl(lambda *operands, **params: compiled(**params)(*operands))
    primitive.def_abstract_eval(checked_abstract_eval)
    mlir.register_lowering(primitive, lower_anywhere)
    mlir.register_lowering(primitive, lower_cuda, platform="cuda")
    batching.primitive_batchers[primitive] = _one_after_another(primitive)
    return primitive


# ---- checks that several operations make


def check_row_dtype(operation: str, name: str, dtype: Any) -> None:
    """Raises if `dtype` is not one that rows can have."""
    if dtype not in ROW_DTYPES:
        expected = ", ".join(str(jnp.dtype(d)) for d in ROW_DTYPES)
        raise DtypeError(
            f"jax_ep.{operation}: {name} has dtype {dtype}; expected one of {expected}. "
            f"Cast it with {name}.astype(...)."
        )


def check_shape(
    operation: str, name: str, shape: tuple[int, ...], expected: tuple[int | str, ...]
) -> None:
    """Compares with `expected`, in which a string stands for any size and is its name."""
    fits = len(shape) == len(expected) and all(
        isinstance(want, str) or want == have for have, want in zip(shape, expected, strict=True)
    )
    if not fits:
        wanted = ", ".join(str(size) for size in expected)
        raise ArgumentError(
            f"jax_ep.{operation}: {name} has shape {shape}; expected [{wanted}]. "
            "Inside shard_map these are the shapes of one rank."
        )


def check_weights(
    operation: str, name: str, weights: jax.Array, expected: tuple[int | str, ...]
) -> jax.Array:
    """Weights of any float dtype as float32."""
    check_shape(operation, name, weights.shape, expected)
    if not jnp.issubdtype(weights.dtype, jnp.floating):
        raise DtypeError(
            f"jax_ep.{operation}: {name} has dtype {weights.dtype}; expected a float dtype. "
            f"Cast it with {name}.astype(jnp.float32)."
        )
    return weights.astype(jnp.float32)


def check_group_sizes(operation: str, group_sizes: jax.Array) -> None:
    """Raises if these are not sizes of one or more groups, int32."""
    check_shape(operation, "group_sizes", group_sizes.shape, ("groups",))
    if group_sizes.shape[0] < 1:
        raise ArgumentError(
            f"jax_ep.{operation}: group_sizes has shape {group_sizes.shape}; expected at least "
            "one group. Give one size for each matrix."
        )
    if group_sizes.dtype != jnp.int32:
        raise DtypeError(
            f"jax_ep.{operation}: group_sizes has dtype {group_sizes.dtype}; expected int32. "
            "Cast it with group_sizes.astype(jnp.int32)."
        )


def check_matrix_dtype(
    operation: str, name: str, matrix: jax.Array, rows_name: str, rows: jax.Array
) -> None:
    """Raises if `rows` cannot be multiplied by `matrix`."""
    if matrix.dtype not in (rows.dtype, jnp.float32):
        raise DtypeError(
            f"jax_ep.{operation}: {name} has dtype {matrix.dtype} and {rows_name} {rows.dtype}; "
            f"expected {name} in {rows_name}'s dtype or float32. Cast it with "
            f"{name}.astype({rows.dtype})."
        )


def check_num_sms(operation: str, num_sms: int | None) -> int:
    """The attribute's form: 0 stands for the heuristic's choice."""
    if num_sms is not None and num_sms < 1:
        raise ArgumentError(
            f"jax_ep.{operation}: num_sms={num_sms}; expected 1 or more. Use None to let jax_ep "
            "choose."
        )
    return num_sms or 0


# ---- lowering


def too_many(**counts: int) -> str | None:
    """The reason that one of these is more than the kernels take, for `unsupported`."""
    for name, count in counts.items():
        if count > MAX_ITEMS:
            return f"{name} is {count}; the kernels take up to {MAX_ITEMS}"
    return None


def _no_cuda_build() -> str | None:
    return None if runtime.has_cuda() else "this build of jax_ep has no CUDA kernels"


_warned: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        runtime.logger.warning(message)


def _lower_custom_call(
    target: str, ctx: Any, operands: Sequence[Any], attributes: dict[str, Any]
) -> Any:
    rule = _replicated_sharding_rule(ctx.avals_in, ctx.avals_out)
    return jax.ffi.ffi_lowering(target, extra_attributes={"sdy.sharding_rule": rule})(
        ctx, *operands, **attributes
    )


def _replicated_sharding_rule(avals_in: Sequence[Any], avals_out: Sequence[Any]) -> Any:
    """Shardy: every dimension is its own factor, to be replicated over the non-manual axes."""
    sizes: list[int] = []

    def factors(aval: Any) -> str:
        names: list[str] = []
        for size in aval.shape:
            names.append(_factor_name(len(sizes)))
            sizes.append(size)
        return "[" + ", ".join(names) + "]"

    operands = ", ".join(factors(aval) for aval in avals_in)
    results = ", ".join(factors(aval) for aval in avals_out)
    names = [_factor_name(index) for index in range(len(sizes))]
    dims = ", ".join(f"{name}={size}" for name, size in zip(names, sizes, strict=True))
    return mlir.ir.Attribute.parse(
        f"#sdy.op_sharding_rule<({operands})->({results}) {{{dims}}} "
        f"need_replication={{{', '.join(names)}}}, custom>"
    )


def _factor_name(index: int) -> str:
    """Shardy's factor names: i to z, then z_1, z_2, ..."""
    letters = string.ascii_lowercase[8:]
    return letters[index] if index < len(letters) else f"z_{index - len(letters) + 1}"


def _refuse_explicit_sharding(operation: str, avals: Sequence[compat.Aval]) -> None:
    for index, aval in enumerate(avals):
        axes = compat.explicit_axes(aval)
        if axes:
            raise ArgumentError(
                f"jax_ep.{operation}: operand {index} of shape {aval.shape} is sharded over the "
                f"Explicit mesh axis {axes[0]!r}, which is not manual here; expected operands "
                "replicated over it. Add the axis to shard_map's axis_names, or use "
                "jax.sharding.reshard before the call."
            )


def _one_after_another(primitive: Primitive) -> Any:
    """Batching by a scan: collectives must come in the same order on every rank."""

    def batch(operands: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
        mapped = [
            None if dim is None else jnp.moveaxis(operand, dim, 0)
            for operand, dim in zip(operands, dims, strict=True)
        ]

        def one(slices: list[Any]) -> Any:
            arguments = [
                operand if piece is None else piece
                for operand, piece in zip(operands, slices, strict=True)
            ]
            return primitive.bind(*arguments, **params)

        results = lax.map(one, mapped)
        return results, [0] * len(results)

    return batch
