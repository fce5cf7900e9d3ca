"""Measures how much of a layer's transfers matmuls can hide, if nothing depends on anything.

  python -P tools/overlap_ceiling.py --out ceiling.json

A layer's dispatch and combine are in flight on a few SMs beside its grouped matmuls, which leave
these free; "apart" is the same one after another. Both run sustained, and with pauses between
programs that hold the mean power at --watts: times exclude the pauses. A ratio over 1 is what a
fused pair could gain at most. Needs nvidia-ml-py.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from rich.console import Console
from rich.table import Table

import jax_ep
from jax_ep._src.transfer.dispatch import dispatched
from jax_ep.bench.common.energy import Boards
from jax_ep.bench.common.programs import AXIS, implementation, sharded
from jax_ep.bench.layer.calls import Calls, Values, values_of
from jax_ep.bench.layer.problem import MODELS, Shape, make_problem
from jax_ep.bench.transfer.problem import make_mesh

SECONDS = 1.5
Layer = Callable[[Any, Values], Any]


@dataclasses.dataclass(frozen=True)
class OnSms(Calls):
    """The calls of a layer, of which matmuls use so many SMs."""

    num_sms: int = 0

    @property
    def params(self) -> Any:
        """Those of `Calls`, on fewer SMs."""
        return dataclasses.replace(super().params, num_sms=self.num_sms)


def apart(calls: Calls) -> Layer:
    """One call after another. The transfers form a chain, and the matmuls another."""

    def layer(carry: Any, v: Values) -> Any:
        x, rows = carry
        sent = calls.dispatch(x, v.operands.topk_ids, v.operands.topk_weights)
        sent, rows = lax.optimization_barrier((sent, rows))
        activations, *_ = calls.up(rows, v.operands.w_up, v.plan)
        sent, activations = lax.optimization_barrier((sent, activations))
        x = calls.combine(sent.rows, sent.plan)
        x, activations = lax.optimization_barrier((x, activations))
        return x, calls.down(activations, v.operands.w_down, v.row_weights, v.plan)

    return layer


def beside(calls: Calls, num_sms: int) -> Layer:
    """The same, the transfers in flight beside the matmuls."""

    def layer(carry: Any, v: Values) -> Any:
        x, rows = carry
        returning = in_flight(calls, x, v, num_sms)
        returning, (_, rows) = jax_ep.overlap(returning, matmuls(calls), (x, rows), v)
        x, _ = lax.optimization_barrier((jax_ep.combine_done(returning), x))
        return x, rows

    return layer


def in_flight(calls: Calls, x: jax.Array, v: Values, num_sms: int) -> jax_ep.InFlight:
    """Starts dispatch, and combine of its rows behind it in the lane."""
    sending = jax_ep.dispatch_start(
        x,
        v.operands.topk_ids,
        v.operands.topk_weights,
        num_experts=calls.problem.routes.num_experts,
        axis_name=AXIS,
        recv_capacity=calls.problem.routes.recv_capacity,
        zero_tail=False,
        num_sms=num_sms,
        implementation=implementation(),
    )
    # Only what follows in the lane may read them now.
    rows, row_weights, plan = sending.results
    sent = dispatched(rows, row_weights, plan, sending.params)
    return jax_ep.combine_start(
        sent.rows, sent.plan, None, num_sms=num_sms, implementation=implementation()
    )


def transfers_on(calls: Calls, num_sms: int) -> Layer:
    """The transfers of `beside` without matmuls."""

    def layer(carry: Any, v: Values) -> Any:
        x, rows = carry
        returning = in_flight(calls, x, v, num_sms)
        x, _ = lax.optimization_barrier((jax_ep.combine_done(returning), x))
        return x, rows

    return layer


def transfers(calls: Calls) -> Layer:
    """Dispatch and combine alone."""

    def layer(carry: Any, v: Values) -> Any:
        sent = calls.dispatch(carry[0], v.operands.topk_ids, v.operands.topk_weights)
        return calls.combine(sent.rows, sent.plan), carry[1]

    return layer


def matmuls(calls: Calls) -> Layer:
    """The two matmuls alone."""

    def layer(carry: Any, v: Values) -> Any:
        activations, *_ = calls.up(carry[1], v.operands.w_up, v.plan)
        return carry[0], calls.down(activations, v.operands.w_down, v.row_weights, v.plan)

    return layer


class Program:
    """Layers one after another, as one compiled program."""

    def __init__(self, layer: Layer, values: Values, mesh: Any, num_layers: int) -> None:
        def run(carry: Any, v: Values) -> Any:
            for _ in range(num_layers):
                carry = layer(carry, v)
            return carry

        self.arguments = (values.operands.x, values.rows), values
        self.compiled = jax.jit(sharded(run, mesh)).lower(*self.arguments).compile()
        self.num_layers = num_layers
        self()

    def __call__(self) -> float:
        """Runs it, and returns the seconds of one layer."""
        begin = time.perf_counter()
        jax.block_until_ready(self.compiled(*self.arguments))
        return (time.perf_counter() - begin) / self.num_layers

    def sustained(self, boards: Boards, count: int) -> dict[str, float]:
        """Returns the seconds of a layer and the watts of a board, the boards never idle."""
        begin, first, calls, running = time.perf_counter(), boards.joules(), 0, None
        while time.perf_counter() - begin < SECONDS:
            following = self.compiled(*self.arguments)
            jax.block_until_ready(running)
            calls, running = calls + 1, following
        jax.block_until_ready(running)
        passed = time.perf_counter() - begin
        watts = (boards.joules() - first) / passed / count
        return {"seconds": passed / calls / self.num_layers, "watts": watts}

    def paused(self, boards: Boards, count: int, pause: float, seconds: float) -> dict[str, float]:
        """Returns the median seconds of a layer without pauses, and the watts with them."""
        begin, first, times = time.perf_counter(), boards.joules(), []
        while (passed := time.perf_counter() - begin) < seconds:
            times.append(self())
            time.sleep(pause)
        watts = (boards.joules() - first) / passed / count
        return {"seconds": statistics.median(times), "watts": watts, "pause": pause}

    def at_power(self, boards: Boards, count: int, watts: float) -> dict[str, float]:
        """Measures with the pause that holds the boards at this power."""
        pause = 0.3 * self() * self.num_layers
        for _ in range(3):
            found = self.paused(boards, count, pause, 0.5)
            cycle = found["seconds"] * self.num_layers + pause
            pause = max(0.0, cycle * (found["watts"] - 110) / (watts - 110) - (cycle - pause))
        return self.paused(boards, count, pause, SECONDS)


def measure_shape(name: str, arguments: argparse.Namespace, mesh: Any, boards: Boards) -> Any:
    """Returns what each form of the layer takes, in both regimes."""
    shape = Shape(arguments.tokens, *MODELS[name])
    problem = make_problem(mesh, shape, "bfloat16", 1, backward=False)
    values = values_of(problem)[0]
    calls = Calls(problem, keep=False)
    total = getattr(jax.devices()[0], "core_count", 132)
    forms: dict[str, Layer] = {"apart": apart(calls)}
    parts: dict[str, Layer] = {"transfers": transfers(calls), "matmuls": matmuls(calls)}
    for sms in arguments.num_sms:
        less = OnSms(problem, keep=False, num_sms=total - sms)
        forms[f"beside, {sms} SMs"] = beside(less, sms)
        parts[f"transfers on {sms}"] = transfers_on(calls, sms)
        parts[f"matmuls on {total - sms}"] = matmuls(less)
    results = {}
    for form, layer in (forms | parts).items():
        program = Program(layer, values, mesh, arguments.layers)
        program.paused(boards, mesh.size, 0, 0.7)  # settles
        results[form] = {"sustained": program.sustained(boards, mesh.size)}
        if form in forms:
            results[form]["paused"] = program.at_power(boards, mesh.size, arguments.watts)
        Console(width=150).print(name, form, results[form])
    return results


def main() -> None:
    """Measures all shapes, and prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["qwen3-30b", "deepseek-v3"], metavar="NAME")
    parser.add_argument("--tokens", type=int, default=4096, help="per rank")
    parser.add_argument("--num-sms", type=int, nargs="+", default=[8, 16, 24], help="of transfers")
    parser.add_argument("--layers", type=int, default=6, help="per program")
    parser.add_argument("--watts", type=float, default=550.0, help="with pauses")
    parser.add_argument("--out", type=pathlib.Path)
    arguments = parser.parse_args()
    mesh = make_mesh(jax.device_count())
    boards = Boards(jax.device_count())
    results = {name: measure_shape(name, arguments, mesh, boards) for name in arguments.shapes}
    table = Table("layer", "form", "µs", "apart / it", "W", "µs, paused", "apart / it", "W")
    for name, forms in results.items():
        for form, both in forms.items():
            cells = []
            for regime, found in both.items():
                ratio = forms["apart"][regime]["seconds"] / found["seconds"]
                cells += [f"{1e6 * found['seconds']:.0f}", f"{ratio:.3f}", f"{found['watts']:.0f}"]
            table.add_row(name, form, *cells)
    Console(width=120).print(f"{jax.device_count()} x {jax.devices()[0].device_kind}", table)
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
