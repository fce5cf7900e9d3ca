"""dispatch and combine over all local GPUs, beside the collectives of JAX, in one process.

T tokens a rank of H elements of bfloat16, each for K of E experts. jax_ep's three operations are
compiled and timed each alone; beside them run lax.ragged_all_to_all of all (token, expert) rows,
with 1 and with 64 updates a peer, lax.all_to_all of as many bytes, and all_gather of the tokens
(psum_scatter of sums, for combine). GB/s are of one number of bytes for all contenders of a case:
those of distinct (token, other rank) pairs of the busiest rank. recv_capacity is what the rank with
most rows receives, so nothing is dropped, and jax_ep's results are checked against numpy. Calls are
chained in one program, one straight after another, 8 of them, or 64 if a rank has up to 256 tokens:
the host may not launch single ones as fast as they run. Those of few tokens are measured singly,
too.

Writes DIR/transfer.json (times, ratios, and the versions of all) after every measurement, so that a
run that is stopped leaves what it had, and at its end DIR/transfer.png. A result counts only if
jax_ep, the machine's bulk-copy all-to-all (ceiling) and JAX's collectives were all there: the
report says who is missing, and why.

Exit status: 0, 1 if --require-all was given and somebody is missing, 2 if there is no GPU.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import pathlib
import sys
from typing import Any

import jax
from rich.console import Console

from jax_ep.bench import options, report, transfer_cases, transfer_plot, transfer_report
from jax_ep.bench.cases import ROTATED_BYTES
from jax_ep.bench.measure import measure
from jax_ep.bench.report import OURS
from jax_ep.bench.transfer_cases import Case
from jax_ep.bench.transfer_contenders import NAMES, Contender, choose_contenders
from jax_ep.bench.transfer_problem import make_mesh, make_problem


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    parser.add_argument(
        "--shape",
        type=transfer_cases.parse_shape,
        action="append",
        metavar="T,H,E,K",
        help="tokens a rank, hidden, experts, choices; may be repeated (default: three shapes)",
    )
    parser.add_argument(
        "--sweep",
        action="store_true",
        help="also the first shape with 1 to 16384 tokens a rank",
    )
    parser.add_argument(
        "--routing",
        choices=transfer_cases.ROUTINGS,
        action="append",
        help="may be repeated (default: balanced, and both for the first shape)",
    )
    parser.add_argument(
        "--num-sms",
        type=options.parse_positive,
        action="append",
        metavar="N",
        help="also jax_ep with at most N multiprocessors; may be repeated (default: no limit)",
    )
    parser.add_argument(
        "--devices",
        type=options.parse_positive,
        metavar="N",
        help="the first N of this machine's (default: all)",
    )
    options.add_arguments(parser, transfer_cases.OPERATIONS, NAMES)


def run(arguments: argparse.Namespace) -> int:
    """Measures, and writes and prints the report."""
    console = options.new_console()
    if not options.can_measure(arguments, console):
        return 2
    shapes = transfer_cases.choose_shapes(arguments.shape, arguments.sweep, arguments.smoke)
    num_devices = checked_devices(arguments.devices, shapes)
    contenders = choose_contenders(arguments.contender, arguments.num_sms)
    chosen = [
        case
        for case in transfer_cases.choose_cases(shapes, arguments.routing, arguments.operation)
        if any(case.operation in contender.operations for contender in contenders)
    ]
    if not chosen:
        sys.exit(
            f"{', '.join(arguments.contender)} cannot {' or '.join(arguments.operation)}; expected "
            f"a contender that can. Give --contender {OURS}, or another --operation."
        )
    results = options.new_results("transfer", arguments)
    results["description"] = " ".join((__doc__ or "").split("Writes DIR")[0].split())
    results["ranks"] = num_devices
    arguments.out.mkdir(parents=True, exist_ok=True)
    measure_all(results, chosen, contenders, arguments, console)
    transfer_plot.plot(results, arguments.out / "transfer.png")
    transfer_report.show(results, console)
    console.print(f"{arguments.out}/transfer.json and transfer.png are written.")
    return 1 if arguments.require_all and results["missing"] else 0


def checked_devices(asked: int | None, shapes: tuple[transfer_cases.Shape, ...]) -> int:
    """How many devices; ends the program with a message where these or the experts do not fit."""
    available = jax.device_count()
    number = asked or available
    if number > available:
        sys.exit(
            f"--devices {number} is more than the {available} devices here; give at most these."
        )
    for shape in shapes:
        if shape.experts % number:
            sys.exit(
                f"The experts of shape {shape} do not divide over {number} devices; expected a "
                f"multiple of {number}. Give another --shape or --devices."
            )
    return number


def measure_all(
    results: dict[str, Any],
    chosen: list[Case],
    contenders: list[Contender],
    arguments: argparse.Namespace,
    console: Console,
) -> None:
    """Adds a record for each case to `results`, and writes them as they come."""
    mesh = make_mesh(results["ranks"])
    path: pathlib.Path = arguments.out / "transfer.json"
    total = sum(
        case.operation in contender.operations for case in chosen for contender in contenders
    )
    with report.progress_bar(console) as progress:
        task = progress.add_task("measuring", total=total, info="")
        for (shape, routing), of_shape in itertools.groupby(chosen, lambda case: case[:2]):
            problem = make_problem(mesh, shape, routing, 0 if arguments.smoke else ROTATED_BYTES)
            for case in of_shape:
                record = transfer_report.new_record(case, problem)
                results["cases"].append(record)
                for contender in contenders:
                    if case.operation not in contender.operations:
                        continue
                    progress.update(task, info=f"{case}, {case.operation}, {contender.name}")
                    measure(
                        record["measurements"],
                        contender.name,
                        functools.partial(contender.start, case.operation, problem, case.chained),
                        options.iterations(arguments),
                    )
                    transfer_report.add_figures(results)
                    report.write(results, path)
                    progress.advance(task)
            del problem  # before the next is made: these are gigabytes
