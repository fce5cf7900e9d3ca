"""Quantizing rows and weights beside a copy, on one device.

T rows of H elements of bfloat16; for weights a T x H matrix, in the layouts of both passes.
Updated weights are float32, as an optimizer leaves them, and beside them is their cast to bfloat16.
GB/s are of the bytes that one pass moves: elements read once, values and scales written once.
"/ copy" is that rate over a copy's. The record has the number of kernels in each program.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep import quant
from jax_ep.bench.common.benchmark import Benchmark, Case, Provider, Required, Started
from jax_ep.bench.common.programs import start_jax
from jax_ep.bench.common.report import OURS, Figure, Record
from jax_ep.bench.matmul.benchmark import COPIED_BYTES, copy_bytes_per_second
from jax_ep.bench.matmul.fp8 import FORMATS

WEIGHTS = "quantize_weights"
UPDATED_WEIGHTS = "quantize_updated_weights"
OPERATIONS: tuple[str, ...] = (*(f"quantize_{name}" for name in FORMATS), WEIGHTS, UPDATED_WEIGHTS)
PURE_JAX = "jax_ep, pure JAX"
CAST = "cast to bfloat16"
MAX_SETS = 16


@dataclasses.dataclass(frozen=True)
class Shape:
    """[rows, hidden]."""

    rows: int
    hidden: int

    def __str__(self) -> str:
        return f"{self.rows}, {self.hidden}"


SHAPES = tuple(Shape(rows, hidden) for hidden in (7168, 2048) for rows in (4096, 32768))


def computation(operation: str, implementation: str | None = None) -> Callable[[jax.Array], Any]:
    """Returns the function that is compiled."""
    if operation in (WEIGHTS, UPDATED_WEIGHTS):
        return functools.partial(
            quant.quantize_for_training, quantization=quant.Recipe(), implementation=implementation
        )
    format = FORMATS[operation.partition("_")[2]]

    def quantize(x: jax.Array) -> quant.Quantized:
        return quant.quantize(x, format, implementation=implementation)

    return quantize


def dtype_of(operation: str) -> Any:
    """Returns the dtype of what is quantized."""
    return jnp.float32 if operation == UPDATED_WEIGHTS else jnp.bfloat16


def start(case: Case, function: Callable[[jax.Array], Any], problem: list[jax.Array]) -> Started:
    """Compiles a function of the case's array."""
    started = start_jax(function, [x.astype(dtype_of(case.operation)) for x in problem])
    started.facts["bytes"] = pass_bytes(case, function)
    return started


def pass_bytes(case: Case, function: Callable[[jax.Array], Any]) -> int:
    """Returns the bytes of one pass."""
    x = jax.ShapeDtypeStruct((case.shape.rows, case.shape.hidden), dtype_of(case.operation))
    written = jax.tree.leaves(jax.eval_shape(function, x))
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in (x, *written))


@dataclasses.dataclass(eq=False)
class Ours:
    """jax_ep's functions, by one implementation."""

    name: str = OURS
    implementation: str | None = None
    operations: tuple[str, ...] = OPERATIONS

    def start(self, case: Case, problem: list[jax.Array]) -> Started:
        """Compiles one operation."""
        return start(case, computation(case.operation, self.implementation), problem)


class Cast:
    """The cast of updated weights for a layer in bfloat16."""

    name = CAST
    operations: tuple[str, ...] = (UPDATED_WEIGHTS,)

    def start(self, case: Case, problem: list[jax.Array]) -> Started:
        """Compiles it by itself."""
        return start(case, lambda x: x.astype(jnp.bfloat16), problem)


PROVIDERS: tuple[Provider, ...] = (Ours(), Ours(PURE_JAX, "xla"), Cast())


class QuantizeBenchmark(Benchmark):
    """Configures the harness."""

    name = "quantize"
    operations = OPERATIONS
    providers = PROVIDERS
    shape_type = Shape
    shapes = SHAPES
    smoke_shapes = (Shape(24, 160),)
    variants = ("normal",)
    variant_option = "distribution"
    figures = (Figure("gigabytes_per_second", "GB/s"), Figure("of_copy", "/ copy", ".2f"))
    average = "median"

    def prepare(self, arguments: argparse.Namespace, results: dict[str, Any]) -> None:
        """Measures a copy."""
        results.update(description=" ".join((__doc__ or "").split()))
        results["copy_bytes_per_second"] = copy_bytes_per_second(
            1 << 20 if arguments.smoke else COPIED_BYTES
        )

    def make_problem(self, shape: Shape, variant: str, rotated_bytes: float) -> list[jax.Array]:
        """Normal elements."""
        size = (shape.rows, shape.hidden)
        sets = math.ceil(rotated_bytes / (2 * shape.rows * shape.hidden))
        return [
            jax.block_until_ready(jax.random.normal(jax.random.key(seed), size, jnp.bfloat16))
            for seed in range(min(max(2, sets), MAX_SETS))
        ]

    def required(self, record: Record) -> Required:
        """jax_ep alone."""
        return ((OURS,),)

    def add_figures(self, results: dict[str, Any]) -> None:
        """The bytes of one pass per second, whatever is moved, and that over a copy's."""
        for record in results["cases"]:
            for measurement in record["measurements"].values():
                seconds = measurement.get("seconds")
                if seconds is not None:
                    rate = measurement["facts"]["bytes"] / seconds
                    measurement["gigabytes_per_second"] = rate / 1e9
                    measurement["of_copy"] = rate / results["copy_bytes_per_second"]


BENCHMARK = QuantizeBenchmark()
