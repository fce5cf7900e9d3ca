"""The providers of grouped matmuls of bfloat16 rows and MXFP4 weights, which are quantized before.

The operation is that of bfloat16 with the format's name. Baselines multiply what these weights
stand for: in bfloat16 the same products, in FP8 with another rounding. torch 2.11 and Triton 3.6
have no matmul of such operands for Hopper: torch's four bits are for Blackwell, in both operands,
and triton_kernels, which has one, is in Triton's repository but not its wheel.

A call may take less than launching it. So a program makes as many as there are groups, one straight
after another, and XLA and torch launch it as a CUDA graph. Sizes move on by some groups from call
to call: where few groups have rows, these are others, whose weights are not in the L2 cache.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jax_ep
from jax_ep import quant
from jax_ep._src.core.chain import in_turn
from jax_ep._src.matmul.grouped_matmul_mxfp4 import weights_only_matmul
from jax_ep._src.matmul.params import GroupedMatmulParams
from jax_ep.bench.common.benchmark import Case, Provider, Started
from jax_ep.bench.common.programs import implementation, start_jax
from jax_ep.bench.common.report import OURS
from jax_ep.bench.matmul import fp8 as matmul_fp8
from jax_ep.bench.matmul import providers as matmul_providers
from jax_ep.bench.matmul.fp8 import PER_ROW

OPERATIONS: tuple[str, ...] = ("forward_mxfp4",)
FORMAT = quant.MxFp4()
MAX_CALLS = 32
STEP = 5  # groups by which sizes move on
DEQUANTIZED = "jax_ep in bfloat16, dequantized before"
FP8 = "jax_ep in FP8"
REQUIRED = ((OURS,), (DEQUANTIZED,), (FP8,), (PER_ROW,))
BYTES_PER_WEIGHT = {OURS: 1 / 2 + 1 / FORMAT.block, DEQUANTIZED: 2.0, FP8: 1.0, PER_ROW: 1.0}

Multiply = Callable[[Any, Any, jax.Array], jax.Array]


def sizes_in_turn(sizes: jax.Array) -> list[jax.Array]:
    """Returns the sizes of successive calls."""
    calls = range(min(len(sizes), MAX_CALLS))
    return jax.block_until_ready([jnp.roll(sizes, STEP * call) for call in calls])


# ---- operands: rows and weights, from bfloat16 rows [rows, k] and matrices [groups, k, n]


@jax.jit
def in_four_bits(lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, quant.Quantized]:
    """Rows as they are, and weights [groups, n, k]."""
    return lhs, quant.quantize(rhs.mT, FORMAT, implementation="xla")


@jax.jit
def dequantized(lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rows as they are, and weights [groups, k, n], exact in bfloat16."""
    _, weights = in_four_bits(lhs, rhs)
    return lhs, quant.dequantize(weights, jnp.bfloat16).mT


@jax.jit(static_argnames="format")
def in_eight_bits(
    lhs: jax.Array, rhs: jax.Array, format: quant.Format
) -> tuple[quant.Quantized, quant.Quantized]:
    """Rows and weights [groups, n, k] in a format of FP8."""
    _, weights = dequantized(lhs, rhs)
    return quant.quantize(lhs, format), quant.quantize_weights(weights, format).mT


# ---- providers


def ours(rows: jax.Array, weights: quant.Quantized, sizes: jax.Array) -> jax.Array:
    """The matmul of `quant.WeightsOnly`; on a GPU its kernel or an error."""
    params = GroupedMatmulParams(
        transpose_rhs=True,
        out_dtype=jnp.dtype(rows.dtype),
        zero_tail=True,
        num_sms=0,
        implementation=implementation(),
    )
    return weights_only_matmul(rows, weights, sizes, params)


def in_bfloat16(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    """jax_ep.grouped_matmul."""
    return jax_ep.grouped_matmul(rows, weights, sizes, implementation=implementation())


def in_fp8(rows: quant.Quantized, weights: quant.Quantized, sizes: jax.Array) -> jax.Array:
    """jax_ep.grouped_matmul of quantized operands."""
    return matmul_fp8.multiply(implementation())(matmul_fp8.Quantized(rows, weights, sizes))


@dataclasses.dataclass(eq=False)
class InTurn:
    """A matmul of jax_ep: one program makes the calls with all sizes."""

    name: str
    operands: Callable[[jax.Array, jax.Array], tuple[Any, Any]]
    multiply: Multiply
    target: str  # on a GPU
    operations: tuple[str, ...] = OPERATIONS

    def start(self, case: Case, problem: list[Any]) -> Started:
        """Compiles the calls."""
        arguments = self.arguments(problem)
        evidence = f"jax_ep.{self.target}.v1" if implementation() == "cuda" else None
        return start_jax(self.calls, [arguments], repeats=len(arguments[2]), evidence=evidence)

    def arguments(self, problem: list[Any]) -> tuple[Any, Any, list[jax.Array]]:
        """Returns rows, weights, and the sizes of all calls."""
        x = problem[0]
        operands = jax.block_until_ready(self.operands(x.lhs, x.rhs))
        return *operands, sizes_in_turn(x.sizes)

    def calls(self, x: tuple[Any, Any, list[jax.Array]]) -> jax.Array:
        """Returns the result of the last call."""
        rows, weights, sizes = x
        result: jax.Array = in_turn(self.multiply, rows, [(weights, each) for each in sizes])
        return result


class Torch:
    """torch._scaled_grouped_mm with a scale per row and column."""

    name = PER_ROW
    operations: tuple[str, ...] = OPERATIONS

    def start(self, case: Case, problem: list[Any]) -> Started:
        """Lends the operands to torch."""
        torch = matmul_providers.import_torch()
        x = problem[0]
        operands = jax.block_until_ready(in_eight_bits(x.lhs, x.rhs, quant.Fp8Row()))
        matmul = matmul_fp8.grouped_of_ends(torch, *operands)
        ends = [matmul_fp8.ends_of(torch, sizes) for sizes in sizes_in_turn(x.sizes)]
        replay = captured(torch, matmul, ends)
        started = matmul_providers.started_in_torch(torch, lambda _: replay(), [None])
        return dataclasses.replace(started, repeats=len(ends))


@dataclasses.dataclass(eq=False)
class Captured:
    """A CUDA graph of calls. It reads where their operands lie, which live as long as it does."""

    graph: Any
    matmul: Callable[[Any], Any]
    arguments: list[Any]
    result: Any  # the last call's; each launch overwrites it

    def __call__(self) -> Any:
        """Launches the calls, and returns the result of the last one."""
        self.graph.replay()
        return self.result


def captured(torch: Any, matmul: Callable[[Any], Any], arguments: list[Any]) -> Captured:
    """Captures a call with each of the arguments as one CUDA graph."""
    matmul(arguments[0])  # Does what is done only once and cannot be captured.
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # JAX's threads may allocate memory meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for each in arguments:
            result = matmul(each)
    return Captured(graph, matmul, arguments, result)


PROVIDERS: tuple[Provider, ...] = (
    InTurn(OURS, in_four_bits, ours, "grouped_matmul_mxfp4"),
    InTurn(DEQUANTIZED, dequantized, in_bfloat16, "grouped_matmul"),
    InTurn(
        FP8,
        functools.partial(in_eight_bits, format=quant.Fp8Block128()),
        in_fp8,
        "grouped_matmul_quantized",
    ),
    Torch(),
)
