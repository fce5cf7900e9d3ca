"""What the commands have in common: options, where they print, and what a run begins with."""

from __future__ import annotations

import argparse
import datetime
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import jax
from rich.console import Console

from jax_ep.bench import report, timing

SMOKE_ITERATIONS = 2


def parse_positive(text: str) -> int:
    """The number; an argparse error if it is none, or less than 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def parse_positives(text: str, names: str, example: str) -> list[int]:
    """The numbers of "1,2,3", as many as `names` ("ROWS,K,N") has; an argparse error otherwise."""
    try:
        numbers = [parse_positive(part) for part in text.split(",")]
    except argparse.ArgumentTypeError:
        numbers = []
    count = names.count(",") + 1
    if len(numbers) != count:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a shape; expected {count} positive numbers {names}, such as {example}"
        )
    return numbers


def add_arguments(
    parser: argparse.ArgumentParser,
    operations: Sequence[str],
    contenders: Sequence[str],
    default_iterations: int = timing.ITERATIONS,
) -> None:
    """The options of every command."""
    parser.add_argument("--operation", choices=operations, action="append", help="may be repeated")
    parser.add_argument("--contender", choices=contenders, action="append", help="may be repeated")
    parser.add_argument(
        "--iterations",
        type=parse_positive,
        default=default_iterations,
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


def iterations(arguments: argparse.Namespace) -> int:
    """How many are asked for."""
    return SMOKE_ITERATIONS if arguments.smoke else int(arguments.iterations)


def new_console() -> Console:
    """Where a command prints."""
    return Console(width=None if sys.stdout.isatty() else 140)  # of a log


def can_measure(arguments: argparse.Namespace, console: Console) -> bool:
    """Whether there is a GPU, or none is needed; says so if there is none."""
    platform = jax.default_backend()
    if platform == "gpu" or arguments.smoke:
        return True
    console.print(
        f"There is no GPU to measure: JAX runs on {platform}. See `python -m jax_ep.doctor`; "
        "--smoke tries the program itself on this machine.",
        style="red",
    )
    return False


def new_results(benchmark: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The results of a run without cases: where and how they are measured."""
    return {
        "benchmark": benchmark,
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": sys.argv[1:],
        "smoke": arguments.smoke,
        "device": jax.devices()[0].device_kind,
        "versions": report.versions(),
        "timing": " ".join((timing.device_times.__doc__ or "").split("Args:")[0].split()),
        "cases": [],
    }
