"""grouped_matmul beside a dense matmul, lax.ragged_dot, tokamax and torch, in one process.

Matmuls run at the GPU's power limit, which is kept on average. After a pause their rate swings
around that at which it settles, with a period of a second: on an H200 quarters of a second differ
by 17 % at first, by 2 % after five seconds. While matmuls follow each other without a pause it does
not swing. So a time is the mean of a second of calls, and jax_ep and the dense matmul are measured
in turns, of which the first does not count: after the pause of compilation it can be some percent
fast. The others have one turn.

Writes DIR/matmul.json (times, ratios, and the versions of all) after every measurement, so that a
run that is stopped leaves what it had, and at its end DIR/matmul.png. A result counts only if every
contender was there: the report says who is missing, and why.

Exit status: 0, 1 if --require-all was given and somebody is missing, 2 if there is no GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console

from jax_ep.bench import cases, matmul_report, options, report, timing
from jax_ep.bench.cases import Case, Operands
from jax_ep.bench.contenders import Contender, Dense, Ours, RaggedDot
from jax_ep.bench.measure import Started, measure
from jax_ep.bench.peers import TokamaxMosaic, TokamaxTriton, Torch

# In this order. A kernel that faults leaves nothing to those after it, so what is tuned is last.
CONTENDERS: tuple[type[Contender], ...] = (
    Dense,
    Ours,
    RaggedDot,
    Torch,
    TokamaxTriton,
    TokamaxMosaic,
)
NAMES = tuple(contender.name for contender in CONTENDERS)
ITERATIONS = 100  # of 10 ms or little more: about a period
ROUNDS = 2  # of jax_ep; the first does not count
COPIED_BYTES = 2**31
LARGEST_DIFFERENCE = 0.02  # of a result's norm; bfloat16 results of float32 sums differ far less


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    parser.add_argument(
        "--shape",
        type=cases.parse_shape,
        action="append",
        metavar="ROWS,K,N,GROUPS",
        help="may be repeated (default: five of training and one of decoding)",
    )
    parser.add_argument(
        "--groups",
        choices=cases.DISTRIBUTIONS,
        action="append",
        help="may be repeated (default: balanced, and all three for the first shape)",
    )
    options.add_arguments(parser, cases.OPERATIONS, NAMES, ITERATIONS)


def run(arguments: argparse.Namespace) -> int:
    """Measures, and writes and prints the report."""
    console = options.new_console()
    if not options.can_measure(arguments, console):
        return 2
    shapes = tuple(arguments.shape or (cases.SMOKE_SHAPES if arguments.smoke else cases.SHAPES))
    results = options.new_results("matmul", arguments)
    results["copy_bytes_per_second"] = copy_bytes_per_second(
        2**20 if arguments.smoke else COPIED_BYTES
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    measure_all(
        results,
        cases.choose_cases(shapes, arguments.groups, arguments.operation),
        [make() for make in CONTENDERS if make.name in (arguments.contender or NAMES)],
        arguments,
        console,
    )
    matmul_report.plot(results, arguments.out / "matmul.png")
    matmul_report.show(results, console)
    console.print(f"{arguments.out}/matmul.json and matmul.png are written.")
    return 1 if arguments.require_all and results["missing"] else 0


def measure_all(
    results: dict[str, Any],
    chosen: list[Case],
    contenders: list[Contender],
    arguments: argparse.Namespace,
    console: Console,
) -> None:
    """Adds a record for each case to `results`, and writes them as they come."""
    iterations = options.iterations(arguments)
    turns = in_turn(contenders)
    with report.progress_bar(console) as progress:
        task = progress.add_task("measuring", total=len(chosen) * len(turns), info="")
        for (shape, distribution), of_shape in itertools.groupby(chosen, lambda case: case[:2]):
            sizes = cases.group_sizes(shape, distribution)
            operands = cases.make_operands(
                shape, sizes, 0 if arguments.smoke else cases.ROTATED_BYTES
            )
            for case in of_shape:
                record = matmul_report.new_record(case, sizes)
                results["cases"].append(record)
                comparison = Comparison(case, operands, iterations, record["measurements"])
                for contender in turns:
                    progress.update(task, info=f"{case}, {case.operation}, {contender.name}")
                    comparison.measure(contender)
                    matmul_report.add_figures(results)
                    report.write(results, arguments.out / "matmul.json")
                    progress.advance(task)
            del operands, comparison  # before the next are made: these are gigabytes


def in_turn(contenders: list[Contender]) -> list[Contender]:
    """Their order in a case: jax_ep `ROUNDS` times, dense before and after each."""
    dense = [contender for contender in contenders if isinstance(contender, Dense)]
    turns: list[Contender] = []
    for contender in contenders:
        if isinstance(contender, Ours):
            for _ in range(ROUNDS):
                turns += [contender, *dense]
        else:
            turns.append(contender)
    return turns


@dataclasses.dataclass
class Comparison:
    """The measurements of one case.

    Attributes:
      case: what is computed.
      operands: sets of them.
      iterations: see `timing.device_times`.
      measurements: by the name of the contender; what `measure` adds to.
    """

    case: Case
    operands: list[Operands]
    iterations: int
    measurements: dict[str, Any]
    _started: dict[str, Started] = dataclasses.field(default_factory=dict[str, Started])
    _ours: jax.Array | None = None

    def measure(self, contender: Contender) -> None:
        """Measures a contender, or records its error. A second time adds to the first."""

        def start() -> Started:
            if contender.name not in self._started:
                self._started[contender.name] = self._start(contender)
            return self._started[contender.name]

        measure(self.measurements, contender.name, start, self.iterations, warm_up_seconds=0)

    def _start(self, contender: Contender) -> Started:
        """Starts it, and compares its result with that of jax_ep."""
        started = contender.start(self.case.operation, self.operands)
        if isinstance(contender, Ours):
            self._ours = started.call(started.arguments[0])
        elif self._ours is not None and not isinstance(contender, Dense):
            result = started.to_jax(started.call(started.arguments[0]))
            difference = float(relative_difference(result, self._ours))
            started.facts["relative_difference"] = difference
            if not difference <= LARGEST_DIFFERENCE:  # NaN is not
                raise ArithmeticError(f"its result differs from that of jax_ep by {difference:.2g}")
        return started


@jax.jit
def relative_difference(a: jax.Array, b: jax.Array) -> jax.Array:
    """The norm of a - b over that of b; fused, on GPUs, so that sums alone take memory (1 MB)."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.sqrt(jnp.sum((a - b) ** 2) / jnp.sum(b**2))


def copy_bytes_per_second(nbytes: int) -> float:
    """Bytes read and written by a copy on the device: what reading weights is compared with.

    By the median, after warming up.
    """
    source = jax.random.bits(jax.random.key(0), (nbytes // 4,), "uint32")
    copy = jax.jit(jnp.copy).lower(source).compile()
    seconds = timing.device_times(copy, [source], timing.ITERATIONS)
    return 2 * nbytes / timing.Times.of(seconds).median
