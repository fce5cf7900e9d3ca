"""What is multiplied: shapes, sizes of groups, and random operands."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep.bench import options

OPERATIONS = ("forward", "input_gradient", "weight_gradient")
DISTRIBUTIONS = ("balanced", "multinomial", "zipf")
ZIPF_EXPONENT = 1.2
ROTATED_BYTES = 100e6  # that operands of successive calls span: twice the 50 MB L2 of an H100
FEW_ROWS = 64  # a group, up to which reading the weights takes longer than multiplying


@dataclasses.dataclass(frozen=True)
class Shape:
    """[rows, k] times [groups, k, n]."""

    rows: int
    k: int
    n: int
    groups: int

    @property
    def flops(self) -> int:
        """Of any of the three operations: a multiplication and an addition for each product."""
        return 2 * self.rows * self.k * self.n

    @property
    def weight_bytes(self) -> int:
        """Of all groups' matrices."""
        return 2 * self.groups * self.k * self.n

    @property
    def is_decode(self) -> bool:
        """Whether weights, not products, take the time."""
        return self.rows <= FEW_ROWS * self.groups

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
SMOKE_SHAPES = (Shape(256, 64, 96, 4), Shape(96, 32, 64, 3))


def parse_shape(text: str) -> Shape:
    """The shape written as "rows,K,N,groups"; an argparse error if it is none."""
    return Shape(*options.parse_positives(text, "ROWS,K,N,GROUPS", "32768,7168,4096,64"))


class Case(NamedTuple):
    """One comparison: all contenders do this."""

    shape: Shape
    distribution: str
    operation: str

    def __str__(self) -> str:
        return f"{self.shape}, {self.distribution}"


def case_of(record: dict[str, Any]) -> Case:
    """The case of a record of the report."""
    shape = Shape(*(record[field.name] for field in dataclasses.fields(Shape)))
    return Case(shape, record["distribution"], record["operation"])


def choose_cases(
    shapes: tuple[Shape, ...], distributions: list[str] | None, operations: list[str] | None
) -> list[Case]:
    """All combinations; by default the uneven distributions for the first shape alone."""
    return [
        Case(shape, distribution, operation)
        for shape in shapes
        for distribution in distributions or DISTRIBUTIONS
        if distributions or distribution == "balanced" or shape == shapes[0]
        for operation in operations or OPERATIONS
    ]


# ---- groups


def group_sizes(shape: Shape, distribution: str) -> np.ndarray:
    """int32[groups] that sum to rows, the same in every run.

    Args:
      shape: what is multiplied.
      distribution: "balanced" (sizes differ by one at most), "multinomial" (each row picks a group
        uniformly) or "zipf" (group of rank r is picked with probability proportional to r^-1.2,
        ranks in random order).
    """
    if distribution == "balanced":
        bounds = np.arange(shape.groups + 1) * shape.rows // shape.groups
        return np.diff(bounds).astype(np.int32)
    random = np.random.default_rng(0)
    return random.multinomial(shape.rows, probabilities(shape.groups, distribution, random)).astype(
        np.int32
    )


def probabilities(groups: int, distribution: str, random: np.random.Generator) -> np.ndarray:
    """Of each group to be picked by a row: float64[groups]."""
    if distribution == "multinomial":
        return np.full(groups, 1 / groups)
    weights = random.permutation(np.arange(1, groups + 1) ** -ZIPF_EXPONENT)
    return weights / weights.sum()


# ---- operands


class Operands(NamedTuple):
    """What the operations read: bfloat16 but for the sizes.

    Attributes:
      lhs: [rows, k].
      rhs: [groups, k, n].
      out_gradient: [rows, n].
      sizes: int32[groups].
    """

    lhs: jax.Array
    rhs: jax.Array
    out_gradient: jax.Array
    sizes: jax.Array


def make_operands(
    shape: Shape, sizes: np.ndarray, rotated_bytes: float = ROTATED_BYTES
) -> list[Operands]:
    """Sets of operands, two at least: as many as make any contender read `rotated_bytes` in all."""
    fewest = 2 * min(  # bytes that the dense matmul reads, which has one matrix for all groups
        shape.rows * shape.k + shape.k * shape.n,
        shape.rows * shape.n + shape.k * shape.n,
        shape.rows * shape.k + shape.rows * shape.n,
    )
    number = max(2, math.ceil(rotated_bytes / fewest))
    on_device = jnp.asarray(sizes)
    sets = [_random_operands(jax.random.key(seed), shape, on_device) for seed in range(number)]
    return jax.block_until_ready(sets)


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
