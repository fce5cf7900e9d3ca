"""The providers of grouped matmuls in FP8, whose operands are quantized before they are timed.

The operations are those of bfloat16 with a format's name. ``dense`` is torch._scaled_mm, thus
cuBLAS or CUTLASS, with the scales of the format. torch._scaled_grouped_mm has a scale per row and
column, beside blocks too: another recipe.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jax_ep
from jax_ep import quant
from jax_ep.bench.common.benchmark import Case, Provider, Started
from jax_ep.bench.common.programs import start_jax
from jax_ep.bench.common.report import OURS
from jax_ep.bench.matmul import providers as matmul_providers
from jax_ep.bench.matmul.providers import Computed

FORMATS: dict[str, quant.Format] = {"block128": quant.Fp8Block128(), "row": quant.Fp8Row()}
OPERATIONS: tuple[str, ...] = tuple(
    f"{operation}_{name}" for name in FORMATS for operation in ("forward", "input_gradient")
)
BFLOAT16 = "jax_ep in bfloat16"
DENSE_PER_TENSOR = "dense, per tensor"
PER_ROW = "torch, per row"
REQUIRED = (("dense",), (DENSE_PER_TENSOR,), (OURS,), (BFLOAT16,), (PER_ROW,))


class Quantized(NamedTuple):
    """The operands of one matmul."""

    lhs: quant.Quantized  # [rows, k]
    rhs: quant.Quantized  # [groups, n, k]
    sizes: jax.Array


def bfloat16_operation(operation: str) -> str:
    """Returns the operation without the format, if it has one."""
    is_one = operation in matmul_providers.OPERATIONS
    return operation if is_one else operation.rpartition("_")[0]


def quantized(case: Case, x: Any, format: quant.Format | None = None) -> Quantized:
    """Quantizes a set of operands, in the case's format if none is given."""
    operation, _, name = case.operation.rpartition("_")
    return _quantize(x, operation == "forward", format or FORMATS[name])


@jax.jit(static_argnums=(1, 2))
def _quantize(x: Any, is_forward: bool, format: quant.Format) -> Quantized:
    if is_forward:
        rhs = quant.quantize_weights(x.rhs, format).mT
        return Quantized(quant.quantize(x.lhs, format), rhs, x.sizes)
    rhs = quant.quantize_weights(x.rhs, format, transpose_rhs=True)
    return Quantized(quant.quantize(x.out_gradient, format), rhs, x.sizes)


class Ours:
    """jax_ep.grouped_matmul of quantized operands; on a GPU its kernel or an error."""

    name = OURS
    operations: tuple[str, ...] = OPERATIONS

    def start(self, case: Case, problem: list[Any]) -> Started:
        """Compiles one operation."""
        sets = jax.block_until_ready([quantized(case, x) for x in problem])
        return start_jax(multiply("cuda" if jax.default_backend() == "gpu" else None), sets)


def multiply(implementation: str | None) -> Callable[[Quantized], jax.Array]:
    """Returns jax_ep.grouped_matmul."""

    def compute(x: Quantized) -> jax.Array:
        return jax_ep.grouped_matmul(*x, transpose_rhs=True, implementation=implementation)

    return compute


class Torch:
    """A matmul of torch, on quantized arrays of JAX, which it reads in place."""

    operations: tuple[str, ...] = OPERATIONS

    def __init__(
        self, name: str, format: quant.Format | None, lend: Callable[[Any, Quantized], Any]
    ):
        self.name = name
        self.format = format  # None: the case's
        self.lend = lend

    def start(self, case: Case, problem: list[Any]) -> Started:
        """Lends the operands to torch."""
        torch = matmul_providers.import_torch()
        calls = [self.lend(torch, quantized(case, x, self.format)) for x in problem]
        return matmul_providers.started_in_torch(torch, lambda call: call(), calls)


def dense(torch: Any, x: Quantized) -> Callable[[], Any]:
    """torch._scaled_mm with the first group's matrix, in the scales' blocks."""
    lhs, rhs = _to_torch(torch, x.lhs.values), _to_torch(torch, x.rhs.values[0])
    if x.lhs.format.is_blocked:
        # It reads the scales of rows along the rows.
        lhs_scales = _to_torch(torch, x.lhs.scales.T).t()
        rhs_scales = _to_torch(torch, x.rhs.scales[0]).t()
    else:
        lhs_scales = _to_torch(torch, x.lhs.scales)
        rhs_scales = _to_torch(torch, x.rhs.scales[0].T)
    fast = not x.lhs.format.is_blocked
    return lambda: torch._scaled_mm(
        lhs, rhs.t(), lhs_scales, rhs_scales, out_dtype=torch.bfloat16, use_fast_accum=fast
    )


def dense_per_tensor(torch: Any, x: Quantized) -> Callable[[], Any]:
    """torch._scaled_mm with one scale per operand: the values of the rows, whatever the scales."""
    lhs, rhs = _to_torch(torch, x.lhs.values), _to_torch(torch, x.rhs.values[0])
    scale = _to_torch(torch, jnp.ones(()))
    return lambda: torch._scaled_mm(
        lhs, rhs.t(), scale, scale, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def grouped(torch: Any, x: Quantized) -> Callable[[], Any]:
    """torch._scaled_grouped_mm."""
    matmul, ends = grouped_of_ends(torch, x.lhs, x.rhs), ends_of(torch, x.sizes)
    return lambda: matmul(ends)


def grouped_of_ends(torch: Any, lhs: quant.Quantized, rhs: quant.Quantized) -> Callable[[Any], Any]:
    """torch._scaled_grouped_mm, as a function of where the groups end."""
    rows, matrices = _to_torch(torch, lhs.values), _to_torch(torch, rhs.values)
    lhs_scales = _to_torch(torch, lhs.scales[:, 0])
    rhs_scales = _to_torch(torch, rhs.scales[..., 0])
    return lambda ends: torch._scaled_grouped_mm(
        rows,
        matrices.transpose(-2, -1),
        lhs_scales,
        rhs_scales,
        offs=ends,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


def ends_of(torch: Any, sizes: jax.Array) -> Any:
    """Lends the ends of the groups to torch."""
    return _to_torch(torch, jnp.cumsum(sizes, dtype=jnp.int32))


def _to_torch(torch: Any, array: jax.Array) -> Any:
    """Lends an array, 8-bit floats as bytes: not every version of DLPack knows these dtypes."""
    if array.dtype != jnp.float8_e4m3fn:
        return torch.from_dlpack(jax.block_until_ready(array))
    as_bytes = jax.lax.bitcast_convert_type(array, jnp.uint8)
    return torch.from_dlpack(jax.block_until_ready(as_bytes)).view(torch.float8_e4m3fn)


class BFloat16(Computed):
    """jax_ep.grouped_matmul of the operands before they are quantized."""

    operations: tuple[str, ...] = OPERATIONS

    def start(self, case: Case, problem: list[Any]) -> Started:
        """Compiles one operation."""
        return start_jax(self.computation(bfloat16_operation(case.operation)), problem)


PROVIDERS: tuple[Provider, ...] = (
    Torch("dense", None, dense),
    Torch(DENSE_PER_TENSOR, quant.Fp8Row(), dense_per_tensor),
    Ours(),
    BFloat16(BFLOAT16, matmul_providers.ours),
    Torch(PER_ROW, quant.Fp8Row(), grouped),
)
