"""Defines primitives: the choice of implementation, the custom call, the batching rule."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import string
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_ep._src.core import checks, compat, runtime
from jax_ep._src.core.errors import UnavailableError

FFI_TARGETS: list[str] = []
"""The custom-call targets of all primitives, filled by `define_primitive`."""

INTERNAL_FOLDERS = tuple(
    f"{folder}{os.sep}"
    for folder in (pathlib.Path(jax.__file__).parent, pathlib.Path(__file__).parents[2])
)
"""The folders of JAX and jax_ep, whose frames a warning skips."""


@dataclasses.dataclass(frozen=True)
class Fallback:
    """Replaces an operation on CUDA where its kernels do not cover a call."""

    action: str  # as in "jax_ep.NAME runs as pure JAX on CUDA"
    function: Callable[..., Sequence[jax.Array]]  # as `reference` of `define_primitive`


def define_primitive(
    operation: str,
    *,
    abstract_eval: Callable[..., Sequence[compat.Aval]],
    reference: Callable[..., Sequence[jax.Array]],
    attributes: Callable[..., dict[str, Any]] | None,
    unsupported: Callable[..., str | None],
    unsupported_on: Callable[..., str | None] = lambda *_, **__: None,
    aliases: Callable[..., dict[int, int]] = lambda **_: {},
    fallback: Fallback | None = None,
    partitioned_by_xla: bool = False,
) -> Primitive:
    """A primitive that lowers to the custom call ``jax_ep.<operation>.v1`` or to `reference`.

    Every primitive has one parameter ``params`` with an ``implementation`` in it, and may have
    flags beside it.

    Args:
      operation: its name.
      abstract_eval: (*avals, **parameters) -> avals of the results.
      reference: (*operands, **parameters) -> results, in plain JAX.
      attributes: (avals, **parameters) -> attributes of the custom call; None if there is none.
      unsupported: (avals, **parameters) -> why the kernels do not cover these, or None.
      unsupported_on: (devices, **parameters) -> why the kernels do not run on these, or None. They
        are those of the mesh, in an array of its shape. It is not asked where they are not known.
      aliases: (**parameters) -> operands that the kernels overwrite, each with its result.
      fallback: what runs on CUDA where the kernels do not cover a call; None for `reference`.
      partitioned_by_xla: whether `reference` runs on CUDA where XLA partitions the program.
    """
    if fallback is None:
        fallback = Fallback("runs as pure JAX on CUDA", reference)
    primitive = Primitive(f"jax_ep.{operation}")
    primitive.multiple_results = True
    target = f"jax_ep.{operation}.v1"
    if attributes is not None:
        FFI_TARGETS.append(target)

    def checked_abstract_eval(*avals: compat.Aval, **params: Any) -> Sequence[compat.Aval]:
        checks.replicated(operation, avals)
        return abstract_eval(*avals, **params)

    def lower_function(function: Any, ctx: Any, *operands: Any, **params: Any) -> Any:
        # The user's settings are for the user's code.
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            return mlir.lower_fun(function, multiple_results=True)(ctx, *operands, **params)

    lower_reference = functools.partial(lower_function, reference)

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
        _check_one_platform(operation, ctx.module_context.platforms)
        if implementation == "xla" or (partitioned_by_xla and compat.is_partitioned(ctx)):
            return lower_reference(ctx, *operands, **params)
        reason = _no_cuda_build() or unsupported(ctx.avals_in, **params)
        if reason is None and (devices := compat.devices_of_call(ctx)) is not None:
            reason = unsupported_on(devices, **params)
        if reason is None:
            assert attributes is not None  # otherwise `unsupported` always has a reason
            runtime.logger.debug("jax_ep.%s is lowered to its CUDA kernel", operation)
            return _lower_custom_call(
                target, ctx, operands, attributes(ctx.avals_in, **params), aliases(**params)
            )
        runtime.logger.debug("jax_ep.%s %s: %s", operation, fallback.action, reason)
        if implementation == "cuda":
            raise UnavailableError(
                f"jax_ep.{operation}: implementation='cuda' was asked for, but {reason}. "
                "Use implementation=None or 'xla' for the pure-JAX implementation."
            )
        warn_once(
            reason,
            f"jax_ep.{operation} {fallback.action}, slower than its kernel: {reason}. "
            "This is said once per reason. implementation='xla' asks for pure JAX without a "
            "warning, and implementation='cuda' makes this an error.",
        )
        return lower_function(fallback.function, ctx, *operands, **params)

    def differentiate(*_: Any, **__: Any) -> Any:
        # JAX comes here from a derivative rule alone: the first derivatives are custom rules.
        raise UnavailableError(
            f"jax_ep.{operation}: a derivative of a derivative was asked for; expected one "
            "derivative in reverse mode. Take the first one of jax.lax.stop_gradient(arguments), "
            "or use lax.ragged_dot and JAX's collectives for second derivatives."
        )

    @functools.cache
    def compiled(**params: Any) -> Any:
        return jax.jit(functools.partial(primitive.bind, **params))

    primitive.def_impl(lambda *operands, **params: compiled(**params)(*operands))
    primitive.def_abstract_eval(checked_abstract_eval)
    mlir.register_lowering(primitive, lower_anywhere)
    mlir.register_lowering(primitive, lower_cuda, platform="cuda")
    ad.primitive_jvps[primitive] = differentiate
    batching.primitive_batchers[primitive] = one_after_another(primitive)
    return primitive


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """Returns the checks to disable so that `jax.export.export` serializes jax_ep's custom calls.

    The targets are versioned, so an exported program runs with every jax_ep that has the same
    version of each::

        export = jax.export.export(
            jax.jit(f), platforms=["cuda"], disabled_checks=jax_ep.export_checks()
        )
    """
    return [jax.export.DisabledSafetyCheck.custom_call(target) for target in FFI_TARGETS]


# ---- what the kernels cover


def too_many(**counts: int) -> str | None:
    """The reason that one of these is more than the kernels take, for `unsupported`."""
    most = runtime.LIMITS["items"]
    for name, count in counts.items():
        if count > most:
            return f"{name} is {count}; the kernels take up to {most}"
    return None


def _no_cuda_build() -> str | None:
    return None if runtime.has_cuda() else "this build of jax_ep has no CUDA kernels"


def _check_one_platform(operation: str, platforms: Sequence[str]) -> None:
    """Raises for a program of several: each compiles all of it, also the calls of another.

    XLA's compiler for CPUs aborts the process on some of them.
    """
    if len(platforms) > 1:
        raise UnavailableError(
            f"jax_ep.{operation}: one program is lowered for {' and '.join(platforms)}; expected "
            "one platform, since each compiles what is for the others, too. Export once for each: "
            "jax.export.export(..., platforms=['cuda'], disabled_checks=jax_ep.export_checks())."
        )


_warned: set[str] = set()


def warn_once(reason: str, message: str) -> None:
    if reason not in _warned:
        _warned.add(reason)
        # The line that is shown is the user's, below all frames of JAX and of jax_ep.
        warnings.warn(message, UserWarning, skip_file_prefixes=INTERNAL_FOLDERS)


# ---- lowering


def _lower_custom_call(
    target: str,
    ctx: Any,
    operands: Sequence[Any],
    attributes: dict[str, Any],
    aliases: dict[int, int],
) -> Any:
    rule = _replicated_sharding_rule(ctx.avals_in, ctx.avals_out)
    lower = jax.ffi.ffi_lowering(
        target, extra_attributes={"sdy.sharding_rule": rule}, operand_output_aliases=aliases
    )
    return lower(ctx, *operands, **attributes)


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


def one_after_another(primitive: Primitive) -> Any:
    """Batching by a scan: collectives must come in the same order on every rank."""

    def batch(operands: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
        mapped = [
            None if dim is None else jnp.moveaxis(operand, dim, 0)
            for operand, dim in zip(operands, dims, strict=True)
        ]

        others = [
            operand if dim is None else None for operand, dim in zip(operands, dims, strict=True)
        ]

        def run(mapped: list[Any], others: list[Any]) -> Any:
            def call(slices: list[Any]) -> Any:
                arguments = [
                    one if other is None else other
                    for one, other in zip(slices, others, strict=True)
                ]
                return primitive.bind(*arguments, **params)

            return lax.map(call, mapped)

        results = compat.over_shards(run, mapped)(mapped, others)
        return results, [0] * len(results)

    return batch
