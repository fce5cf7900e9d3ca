"""What is dispatched and combined: shapes, routings, and single calls or chains of them."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax_ep.bench import options

OPERATIONS: tuple[str, ...] = ("dispatch", "redispatch", "combine")
ROUTINGS = ("balanced", "zipf")
# Launching from the host may take longer than a transfer: calls are chained in one program, which
# should take a millisecond. With so few tokens a rank more of them, and single calls are measured,
# too.
FEW_TOKENS = 256
CHAINED_OF_FEW = 64
CHAINED = 8
ELEMENT_BYTES = 2  # bfloat16


@dataclasses.dataclass(frozen=True)
class Shape:
    """[tokens, hidden] on every rank, each token for `choices` of all `experts`."""

    tokens: int
    hidden: int
    experts: int
    choices: int

    @property
    def row_bytes(self) -> int:
        """Of one token."""
        return ELEMENT_BYTES * self.hidden

    def __str__(self) -> str:
        return f"{self.tokens}, {self.hidden}, {self.experts}, {self.choices}"


SHAPES = (Shape(4096, 7168, 256, 8), Shape(4096, 2048, 128, 8), Shape(4096, 4096, 8, 2))
SWEEP_TOKENS = (1, 8, 32, 128, 512, 2048, 4096, 8192, 16384)
SMOKE_SHAPES = (Shape(300, 16, 8, 2), Shape(6, 16, 8, 2))  # with many tokens and with few
SMOKE_SWEEP_TOKENS = (1, 24, 300)


def parse_shape(text: str) -> Shape:
    """The shape written as "T,H,E,K"; an argparse error if it is none."""
    shape = Shape(*options.parse_positives(text, "T,H,E,K", "4096,7168,256,8"))
    if shape.choices > shape.experts:
        raise argparse.ArgumentTypeError(
            f"{text!r} has {shape.choices} choices of {shape.experts} experts; expected at most "
            "as many choices as experts, since those of a token are distinct"
        )
    return shape


def choose_shapes(given: Sequence[Shape] | None, sweep: bool, smoke: bool) -> tuple[Shape, ...]:
    """Those given or by default; with `sweep` then the first one with other numbers of tokens."""
    shapes = tuple(given or (SMOKE_SHAPES if smoke else SHAPES))
    tokens = SMOKE_SWEEP_TOKENS if smoke else SWEEP_TOKENS
    swept = tuple(dataclasses.replace(shapes[0], tokens=t) for t in tokens if sweep)
    return tuple(dict.fromkeys(shapes + swept))


class Case(NamedTuple):
    """One comparison: all contenders do this.

    Attributes:
      shape: what is sent.
      routing: one of ROUTINGS.
      operation: one of OPERATIONS.
      chained: how many calls, each waiting for the one before, one compiled program makes.
    """

    shape: Shape
    routing: str
    operation: str
    chained: int

    def __str__(self) -> str:
        chained = f", {self.chained} chained" if self.chained > 1 else ""
        return f"{self.shape}, {self.routing}{chained}"


def case_of(record: dict[str, Any]) -> Case:
    """The case of a record of the report."""
    shape = Shape(*(record[field.name] for field in dataclasses.fields(Shape)))
    return Case(shape, record["routing"], record["operation"], record["chained"])


def choose_cases(
    shapes: Sequence[Shape], routings: Sequence[str] | None, operations: Sequence[str] | None
) -> list[Case]:
    """All combinations; by default uneven routing for the first shape alone.

    All are of chained calls; with few tokens a rank single calls are measured, too.
    """
    return [
        Case(shape, routing, operation, chained)
        for shape in shapes
        for routing in routings or ROUTINGS
        if routings or routing == "balanced" or shape == shapes[0]
        for operation in operations or OPERATIONS
        for chained in ((1, CHAINED_OF_FEW) if shape.tokens <= FEW_TOKENS else (CHAINED,))
    ]
