"""Small transfers, as `python -m jax_ep.bench transfer` makes them, for its suites."""

from __future__ import annotations

import unittest.mock

import testing  # noqa: F401  isort: skip  starts the backend of the tier

from jax_ep.bench import transfer_contenders
from jax_ep.bench.transfer_cases import Shape
from jax_ep.bench.transfer_problem import make_mesh, make_problem

SHAPE = Shape(tokens=9, hidden=16, experts=8, choices=3)


def problem_of(ranks=4, routing="zipf", shape=SHAPE):
    return make_problem(make_mesh(ranks), shape, routing, 0)


def captured(contender, operation, problem):
    """(transfer, arguments, mesh, chained, evidence) of what a contender would compile."""
    with unittest.mock.patch.object(transfer_contenders, "start_sharded") as start:
        contender.start(operation, problem, 1)
    return start.call_args.args
