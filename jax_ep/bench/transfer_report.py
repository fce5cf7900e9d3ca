"""What is told of transfers: figures and tables."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.console import Console
from rich.table import Table

from jax_ep.bench import report
from jax_ep.bench.report import OURS, Record
from jax_ep.bench.transfer_cases import Case, case_of
from jax_ep.bench.transfer_problem import Problem

CEILING = "ceiling"  # the machine's bulk-copy all-to-all
REQUIRED: report.Required = (
    (OURS,),
    (CEILING,),
    ("lax.ragged_all_to_all 1", "lax.ragged_all_to_all 64"),
    ("lax.all_to_all",),
    ("all_gather/psum_scatter",),
)
# Collectives do not run this one.
REQUIRED_BY_PLAN: report.Required = ((OURS,), (CEILING,))


def new_record(case: Case, problem: Problem) -> Record:
    """The record of a case, without measurements."""
    return dataclasses.asdict(case.shape) | {
        "routing": case.routing,
        "operation": case.operation,
        "chained": case.chained,
        "ranks": problem.num_ranks,
        "remote_bytes": problem.remote_bytes,
        "recv_capacity": problem.routes.recv_capacity,
        "sets": len(problem.sets),
        "measurements": {},
    }


def add_figures(results: dict[str, Any]) -> None:
    """Adds what follows from the times to every measurement, and who is missing to `results`.

    A measurement gets

      seconds, jax_ep_speedup: see `report.add_seconds`; of one call, chained or not.
      gigabytes_per_second: the case's `remote_bytes` in that time, whatever the contender sends.
      of_ceiling: that over the ceiling's; None if the ceiling was not measured.
    """
    report.add_seconds(results["cases"], "median")
    for record in results["cases"]:
        ceiling = record["measurements"].get(CEILING, {}).get("seconds")
        for measurement in record["measurements"].values():
            seconds = measurement.get("seconds")
            if seconds is not None:
                measurement["gigabytes_per_second"] = record["remote_bytes"] / seconds / 1e9
                measurement["of_ceiling"] = None if ceiling is None else ceiling / seconds
    report.add_missing(results, _required)


def _required(record: Record) -> report.Required:
    return REQUIRED_BY_PLAN if record["operation"] == "redispatch" else REQUIRED


def show(results: dict[str, Any], console: Console) -> None:
    """Prints a table for each operation, and who is missing."""
    for operation, records in report.by_operation(results["cases"]).items():
        title = f"{operation} on {results['ranks']} x {results['device']}"
        console.print(_operation_table(records, title))
    report.show_missing(results, console)


def _operation_table(records: list[Record], title: str) -> Table:
    table = Table(title=title, caption="GB/s: of de-duplicated remote bytes of the busiest rank")
    table.add_column("T, H, E, K, routing")
    table.add_column("contender")
    for heading in ("µs", "fastest", "slowest", "GB/s", "of ceiling", "jax_ep is faster"):
        table.add_column(heading, justify="right")
    for record in records:
        case = str(case_of(record))
        for name, measurement in record["measurements"].items():
            table.add_row(case, name, *_cells(name, measurement))
            case = ""  # once
        table.add_section()
    return table


def _cells(name: str, measurement: dict[str, Any]) -> list[str]:
    if "error" in measurement:
        return ["error"]
    minimum = min(times["minimum"] for times in measurement["rounds"])
    maximum = max(times["maximum"] for times in measurement["rounds"])
    of_ceiling, speedup = measurement["of_ceiling"], measurement.get("jax_ep_speedup")
    return [
        *(f"{seconds * 1e6:.1f}" for seconds in (measurement["seconds"], minimum, maximum)),
        f"{measurement['gigabytes_per_second']:.3g}",
        "" if of_ceiling is None else f"{of_ceiling:.2f}",
        "" if speedup is None or name == OURS else f"{speedup:.2f}x",
    ]
