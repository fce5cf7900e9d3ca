"""grouped_matmul beside a dense matmul, lax.ragged_dot, tokamax and torch, in one process.

Operations with the name of a format have quantized operands; --operation asks for them. With
forward_mxfp4 the weights are, and by default the shapes are those of gpt-oss-120b's experts on one
of four ranks, for 1 to 16384 rows. It has no dense matmul, and jax_ep is interleaved with its
bfloat16 matmul of the same weights.

Matmuls run at the GPU's power limit, which is kept on average. After a pause their rate swings
around that at which it settles, with a period of a second: on an H200 quarters of a second differ
by 17 % at first, by 2 % after five seconds. While matmuls follow each other without a pause it does
not swing. So a time is the mean of a second of calls, and jax_ep and the dense matmul are
interleaved, in rounds of which the first does not count. The others have one round.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
from collections.abc import Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep.bench.common import energy, timing
from jax_ep.bench.common.benchmark import Benchmark, Required, Started
from jax_ep.bench.common.report import OURS, Figure, Record
from jax_ep.bench.matmul import fp8 as matmul_fp8
from jax_ep.bench.matmul import mxfp4 as matmul_mxfp4
from jax_ep.bench.matmul import providers as matmul_providers

DISTRIBUTIONS = ("balanced", "multinomial", "zipf")
ZIPF_EXPONENT = 1.2
FEW_ROWS = 64  # per group, up to which reading the weights takes longer than multiplying
ROUNDED_TO = 64  # rows per group, for the comparison of uneven with balanced groups
COPIED_BYTES = 2**31
MAX_DIFFERENCE = (
    0.02  # relative to a result's norm; bfloat16 results of float32 sums differ far less
)
MAX_FP8_DIFFERENCE = 0.06  # of two recipes, or of one and bfloat16: 3.8 % with normal operands
DENSE = ("dense", matmul_fp8.DENSE_PER_TENSOR)
OTHER_RECIPES = (matmul_fp8.BFLOAT16, matmul_fp8.PER_ROW, matmul_mxfp4.FP8)


@dataclasses.dataclass(frozen=True)
class Shape:
    """[rows, k] times [groups, k, n]."""

    rows: int
    k: int
    n: int
    groups: int

    def __str__(self) -> str:
        return f"{self.rows}, {self.k} -> {self.n}, {self.groups}"


SHAPES = (
    Shape(32768, 7168, 4096, 64),
    Shape(32768, 2048, 7168, 64),
    Shape(32768, 2048, 1536, 32),
    Shape(32768, 768, 2048, 32),
    Shape(8192, 4096, 28672, 2),
    Shape(512, 7168, 4096, 64),
)
GPT_OSS_SHAPES = tuple(  # up, down
    Shape(rows, 2880, n, 32)
    for rows in (1, 4, 16, 64, 256, 1024, 4096, 16384)
    for n in (5760, 2880)
)
SMOKE_SHAPES = (Shape(256, 64, 96, 4), Shape(96, 32, 64, 3))


class Operands(NamedTuple):
    """The arrays of the operations: bfloat16 but for the sizes."""

    lhs: jax.Array  # [rows, k]
    rhs: jax.Array  # [groups, k, n]
    out_gradient: jax.Array  # [rows, n]
    sizes: jax.Array  # int32[groups]


class Problem(list[Operands]):
    """Sets of operands, for calls in turn."""

    @property
    def facts(self) -> dict[str, Any]:
        """Values for the record of a case."""
        return {"group_sizes": np.asarray(self[0].sizes).tolist()}


class MatmulBenchmark(Benchmark):
    """Configures the harness."""

    name = "matmul"
    operations = (
        *matmul_providers.OPERATIONS,
        *matmul_fp8.OPERATIONS,
        *matmul_mxfp4.OPERATIONS,
    )
    default_operations = matmul_providers.OPERATIONS
    # A kernel that faults leaves nothing to those after it, so what is tuned is last.
    providers = (
        *matmul_providers.PROVIDERS,
        *matmul_fp8.PROVIDERS,
        *matmul_mxfp4.PROVIDERS,
    )
    shape_type = Shape
    shapes = SHAPES
    smoke_shapes = SMOKE_SHAPES
    variants = DISTRIBUTIONS
    variant_option = "groups"
    figures = (
        Figure("tflops", "TFLOP/s"),
        Figure("rounded_up_tflops", f"balanced, to {ROUNDED_TO} rows"),
        Figure("weights_tbps", "weights, TB/s"),
        Figure("of_copy", "of a copy", ".2f"),
        *energy.FIGURES,
    )
    drawn = (figures[0], figures[2])  # shapes of decoding read weights
    average = "mean"  # the power limit is kept on average
    rounds = 2
    interleaved = ("dense", matmul_mxfp4.DEQUANTIZED)
    iterations = 100  # each 10 ms or little more: together about a period
    warm_up_seconds = 0
    has_energy = True
    read: Collection[str] = matmul_providers.OPERATIONS  # the operations whose operands are read

    def default_shapes(self, arguments: argparse.Namespace) -> tuple[Any, ...]:
        """Those of gpt-oss, if four-bit weights are all that is asked for."""
        asked = set(arguments.operation or self.default_operations)
        if arguments.smoke or not asked <= set(matmul_mxfp4.OPERATIONS):
            return super().default_shapes(arguments)
        return GPT_OSS_SHAPES

    def prepare(self, arguments: argparse.Namespace, results: dict[str, Any]) -> None:
        """Measures a copy, which reading weights is compared with."""
        asked = arguments.operation or self.default_operations
        self.read = {matmul_fp8.bfloat16_operation(operation) for operation in asked}
        copied = 2**20 if arguments.smoke else COPIED_BYTES
        results["copy_bytes_per_second"] = copy_bytes_per_second(copied)

    def make_problem(self, shape: Shape, variant: str, rotated_bytes: float) -> Problem:
        """Random operands."""
        return make_operands(shape, group_sizes(shape, variant), rotated_bytes, self.read)

    def check(self, started: Started, name: str, ours: Started | None) -> None:
        """Compares a result with that of jax_ep. The dense matmul computes something else."""
        if ours is None or name in (OURS, *DENSE):
            return
        result, expected = (s.to_jax(s.call(s.arguments[0])) for s in (started, ours))
        difference = float(relative_difference(result, expected))
        started.facts["relative_difference"] = difference
        largest = MAX_FP8_DIFFERENCE if name in OTHER_RECIPES else MAX_DIFFERENCE
        if not difference <= largest:  # NaN is not
            raise ArithmeticError(f"its result differs from that of jax_ep by {difference:.2g}")

    def required(self, record: Record) -> Required:
        """One of tokamax's implementations is enough."""
        if record["operation"] in matmul_fp8.OPERATIONS:
            return matmul_fp8.REQUIRED
        if record["operation"] in matmul_mxfp4.OPERATIONS:
            return matmul_mxfp4.REQUIRED
        tokamax = ("tokamax mosaic", "tokamax triton")
        return (("dense",), (OURS,), ("lax.ragged_dot",), tokamax, ("torch",))

    def add_figures(self, results: dict[str, Any]) -> None:
        """Adds the figures.

        weights_tbps, for shapes of decoding: the bytes per second of the weights of groups with
          rows; of_copy: the same over those of a copy.
        rounded_up_tflops, for uneven groups: the balanced rate times rows, over the rows when
          each group is rounded up to 64; none where the balanced case was not measured.
        """
        balanced: dict[tuple[str, str], float] = {}
        for record in results["cases"]:
            shape = Shape(**record["sizes"])
            balanced_key = f"{record['operation']}/{shape}/balanced"
            for name, measurement in record["measurements"].items():
                if "seconds" not in measurement:
                    continue
                seconds = measurement["seconds"]
                measurement["tflops"] = 2 * shape.rows * shape.k * shape.n / seconds / 1e12
                if record["key"] == balanced_key:
                    balanced[balanced_key, name] = measurement["tflops"]
                elif (balanced_key, name) in balanced and name not in DENSE:
                    sizes = record["group_sizes"]
                    rounded_up = sum(-(-size // ROUNDED_TO) * ROUNDED_TO for size in sizes)
                    rate = balanced[balanced_key, name] * shape.rows / rounded_up
                    measurement["rounded_up_tflops"] = rate
                if shape.rows <= FEW_ROWS * shape.groups and name not in DENSE:
                    active = sum(size > 0 for size in record["group_sizes"])
                    weight_bytes = bytes_per_weight(record["operation"], name)
                    rate = weight_bytes * active * shape.k * shape.n / seconds
                    measurement["weights_tbps"] = rate / 1e12
                    measurement["of_copy"] = rate / results["copy_bytes_per_second"]


def bytes_per_weight(operation: str, name: str) -> float:
    """Returns the bytes that a provider reads of each weight."""
    if operation in matmul_mxfp4.OPERATIONS:
        return matmul_mxfp4.BYTES_PER_WEIGHT[name]
    is_fp8 = operation in matmul_fp8.OPERATIONS and name != matmul_fp8.BFLOAT16
    return 1.0 if is_fp8 else 2.0


BENCHMARK = MatmulBenchmark()


# ---- operands


def group_sizes(shape: Shape, distribution: str) -> np.ndarray:
    """Returns int32[groups] that sum to rows, the same in every run.

    Args:
      shape: of the matmul.
      distribution: "balanced" (sizes differ by one at most), "multinomial" (each row picks a group
        uniformly) or "zipf" (see `probabilities`).
    """
    if distribution == "balanced":
        bounds = np.arange(shape.groups + 1) * shape.rows // shape.groups
        return np.diff(bounds).astype(np.int32)
    random = np.random.default_rng(0)
    sizes = random.multinomial(shape.rows, probabilities(shape.groups, distribution, random))
    return sizes.astype(np.int32)


def probabilities(groups: int, distribution: str, random: np.random.Generator) -> np.ndarray:
    """Returns each group's probability; "zipf" has rank^-1.2, with the ranks in random order."""
    if distribution != "zipf":
        return np.full(groups, 1 / groups)
    weights = random.permutation(np.arange(1, groups + 1) ** -ZIPF_EXPONENT)
    return weights / weights.sum()


def make_operands(
    shape: Shape,
    sizes: np.ndarray,
    rotated_bytes: float,
    operations: Collection[str] = matmul_providers.OPERATIONS,
) -> Problem:
    """Makes sets of operands, two at least: every provider reads `rotated_bytes` of them in all."""
    lhs, rhs, out = shape.rows * shape.k, shape.k * shape.n, shape.rows * shape.n
    # The dense matmul reads one matrix for all groups.
    read = {"forward": lhs + rhs, "input_gradient": out + rhs, "weight_gradient": lhs + out}
    fewest = 2 * min(read[operation] for operation in operations)
    number = max(2, math.ceil(rotated_bytes / fewest))
    on_device = jnp.asarray(sizes)
    sets = [_random_operands(jax.random.key(seed), shape, on_device) for seed in range(number)]
    return Problem(jax.block_until_ready(sets))


@functools.partial(jax.jit, static_argnums=1)
def _random_operands(key: jax.Array, shape: Shape, sizes: jax.Array) -> Operands:
    def normal(key: jax.Array, *dimensions: int) -> jax.Array:
        return jax.random.normal(key, dimensions, jnp.bfloat16)

    for_lhs, for_rhs, for_out = jax.random.split(key, 3)
    return Operands(
        lhs=normal(for_lhs, shape.rows, shape.k),
        rhs=normal(for_rhs, shape.groups, shape.k, shape.n),
        out_gradient=normal(for_out, shape.rows, shape.n),
        sizes=sizes,
    )


@jax.jit
def relative_difference(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the norm of a - b over that of b; fused, on GPUs, so that only sums take memory."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.sqrt(jnp.sum((a - b) ** 2) / jnp.sum(b**2))


def copy_bytes_per_second(nbytes: int) -> float:
    """Returns the bytes per second that a copy on the device reads and writes: the median."""
    source = jax.random.bits(jax.random.key(0), (nbytes // 4,), "uint32")
    copy = jax.jit(jnp.copy).lower(source).compile()
    seconds = timing.device_times(copy, [source], timing.ITERATIONS)
    return 2 * nbytes / timing.Times.of(seconds).median
