"""`python -m jax_ep.bench` in the process of a test, and a small problem of its transfers."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pathlib
import tempfile
import unittest.mock
from typing import Any

import numpy as np

from jax_ep.bench import __main__ as bench
from jax_ep.bench.common import timing
from jax_ep.bench.transfer.problem import Problem, Shape, make_mesh, make_problem

SHAPE = Shape(tokens=9, hidden=16, experts=8, top_k=3)
QUICK = {"WARM_UP_SECONDS": 0, "BURST_SECONDS": 0.001}


def run(*arguments: str) -> tuple[int, str]:
    """Exit status and output of a command, without the time for warming up."""
    printed = io.StringIO()
    with (
        unittest.mock.patch("sys.argv", ["bench", *arguments]),
        unittest.mock.patch.dict(os.environ),
        unittest.mock.patch.multiple(timing, **QUICK),
        contextlib.redirect_stdout(printed),
    ):
        return bench.main(), printed.getvalue()


def smoke(command: str, *arguments: str) -> tuple[int, str, dict[str, Any]]:
    """Exit status, output and results of a smoke test, which has drawn a plot, too."""
    with tempfile.TemporaryDirectory() as folder:
        status, output = run(command, "--smoke", *arguments, "--out", folder)
        results = json.loads(pathlib.Path(folder, f"{command}.json").read_text())
        plot = pathlib.Path(folder, f"{command}.png").read_bytes()
    assert plot.startswith(b"\x89PNG")
    return status, output, results


def transfer_problem_of(ranks: int = 4, routing: str = "zipf", shape: Shape = SHAPE) -> Problem:
    """A small problem, with two sets of operands."""
    return make_problem(make_mesh(ranks), shape, routing, 0)


def ragged_all_to_all(rows, outputs, input_offsets, send_sizes, output_offsets, recv_sizes):
    """lax.ragged_all_to_all as documented, on lists of ranks; counts how often rows are written."""
    ranks, updates = len(rows), len(input_offsets[0]) // len(rows)
    written = [np.zeros(len(output), int) for output in outputs]
    for source in range(ranks):
        for i in range(ranks * updates):
            target, back = i // updates, source * updates + i % updates
            start, size, at = (a[source][i] for a in (input_offsets, send_sizes, output_offsets))
            assert size == recv_sizes[target][back] and start + size <= len(rows[source])
            outputs[target][at : at + size] = rows[source][start : start + size]
            written[target][at : at + size] += 1
    return written
