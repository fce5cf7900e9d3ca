"""grouped_matmul beside a dense matmul, lax.ragged_dot, tokamax and torch, in one process.

Writes DIR/matmul.json (times, ratios, and the versions of all) after every measurement, so that a
run that is stopped leaves what it had, and at its end DIR/matmul.png. A result counts only if every
contender was there: the report says who is missing, and why.

Exit status: 0, 1 if --require-all was given and somebody is missing, 2 if there is no GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console

from jax_ep.bench import cases, report, timing
from jax_ep.bench.cases import Case, Operands
from jax_ep.bench.contenders import Contender, Dense, Ours, RaggedDot, Started
from jax_ep.bench.peers import TokamaxMosaic, TokamaxTriton, Torch

# In this order. A kernel that faults leaves nothing to those after it, so what is tuned is last.
CONTENDERS: tuple[Callable[[], Contender], ...] = (
    Dense,
    Ours,
    RaggedDot,
    Torch,
    TokamaxTriton,
    TokamaxMosaic,
)
NAMES = tuple(contender().name for contender in CONTENDERS)
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
    parser.add_argument(
        "--operation", choices=cases.OPERATIONS, action="append", help="may be repeated"
    )
    parser.add_argument("--contender", choices=NAMES, action="append", help="may be repeated")
    parser.add_argument(
        "--iterations",
        type=cases.parse_positive,
        default=timing.ITERATIONS,
        help="of at least 10 ms each (default: %(default)s; fewer for calls of more than 50 ms)",
    )
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("bench"), metavar="DIR")
    parser.add_argument(
        "--require-all", action="store_true", help="exit with status 1 if a contender is missing"
    )
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="tiny shapes and 2 iterations, on a CPU too: shows that it works, measures nothing",
    )


def run(arguments: argparse.Namespace) -> int:
    """Measures, and writes and prints the report."""
    console = Console(width=None if sys.stdout.isatty() else 140)  # of a log
    platform = jax.default_backend()
    if platform != "gpu" and not arguments.smoke:
        console.print(
            f"There is no GPU to measure: JAX runs on {platform}. See `python -m jax_ep.doctor`; "
            "--smoke tries the program itself on this machine.",
            style="red",
        )
        return 2
    shapes = tuple(arguments.shape or (cases.SMOKE_SHAPES if arguments.smoke else cases.SHAPES))
    results = {
        "benchmark": "matmul",
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": sys.argv[1:],
        "smoke": arguments.smoke,
        "device": jax.devices()[0].device_kind,
        "versions": report.versions(),
        "timing": " ".join((timing.device_times.__doc__ or "").split("Args:")[0].split()),
        "copy_bytes_per_second": copy_bytes_per_second(2**20 if arguments.smoke else COPIED_BYTES),
        "cases": [],
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    measure_all(
        results,
        cases.choose_cases(shapes, arguments.groups, arguments.operation),
        [make() for make in CONTENDERS if make().name in (arguments.contender or NAMES)],
        arguments,
        console,
    )
    report.plot(results, arguments.out / "matmul.png")
    report.show(results, console)
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
    iterations = 2 if arguments.smoke else arguments.iterations
    turns = in_turn(contenders)
    with report.progress_bar(console) as progress:
        task = progress.add_task("measuring", total=len(chosen) * len(turns), info="")
        for (shape, distribution), of_shape in itertools.groupby(chosen, lambda case: case[:2]):
            sizes = cases.group_sizes(shape, distribution)
            operands = cases.make_operands(
                shape, sizes, 0 if arguments.smoke else cases.ROTATED_BYTES
            )
            for case in of_shape:
                record = report.new_record(case, sizes)
                results["cases"].append(record)
                comparison = Comparison(case, operands, iterations, record["measurements"])
                for contender in turns:
                    progress.update(task, info=f"{shape}, {distribution}, {contender.name}")
                    comparison.measure(contender)
                    report.write(results, arguments.out / "matmul.json")
                    progress.advance(task)
            del operands, comparison  # before the next are made: these are gigabytes


def in_turn(contenders: list[Contender]) -> list[Contender]:
    """Their order in a case: dense both before and after jax_ep, since clocks wander."""
    turns: list[Contender] = []
    for contender in contenders:
        turns.append(contender)
        if isinstance(contender, Ours):
            turns += [other for other in contenders if isinstance(other, Dense)]
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
        try:
            if contender.name not in self._started:
                self._started[contender.name] = self._start(contender)
            started = self._started[contender.name]
            seconds = timing.device_times(
                started.call, started.arguments, self.iterations, started.completion
            )
        except Exception as error:  # noqa: BLE001  whatever it is, the others go on
            text = " ".join(str(error).split())[:500]
            self.measurements[contender.name] = {"error": f"{type(error).__name__}: {text}"}
            return
        rounds = self.measurements.setdefault(
            contender.name, {"facts": started.facts, "rounds": []}
        )
        rounds["rounds"].append(dataclasses.asdict(timing.Times.of(seconds)))

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
    """The norm of a - b over that of b."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.sqrt(jnp.sum((a - b) ** 2) / jnp.sum(b**2))


def copy_bytes_per_second(nbytes: int) -> float:
    """Bytes read and written by a copy on the device: what reading weights is compared with."""
    source = jax.random.bits(jax.random.key(0), (nbytes // 4,), "uint32")
    copy = jax.jit(jnp.copy).lower(source).compile()
    seconds = timing.device_times(copy, [source], timing.ITERATIONS)
    return 2 * nbytes / timing.Times.of(seconds).median
