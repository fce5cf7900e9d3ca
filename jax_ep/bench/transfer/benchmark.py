"""dispatch and combine over all local GPUs, beside the collectives of JAX, in one process.

T tokens per rank of H elements of bfloat16, each for K of E experts. jax_ep's three operations are
compiled and timed each alone; beside them run lax.ragged_all_to_all of all (token, expert) rows,
with 1 and with 64 updates per peer, lax.all_to_all of as many bytes, and all_gather of the tokens
(psum_scatter of sums, for combine). GB/s are of one number of bytes for all providers of a case:
those of distinct (token, other rank) pairs of the busiest rank. recv_capacity is what the rank with
most rows receives, so nothing is dropped. jax_ep's results must have the bits of its pure-JAX
implementation. Calls are chained in one program, one straight after another, 8 of them, or 64 if a
rank has up to 256 tokens: the host may not launch single ones as fast as they run. Those are
measured singly, too. Operations with the name of a format have quantized rows; --operation asks for
them, and their bytes are those of bfloat16 rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import Any

import jax

from jax_ep.bench.common import harness
from jax_ep.bench.common.benchmark import Benchmark, Provider, Required
from jax_ep.bench.common.report import OURS, Figure, Record
from jax_ep.bench.transfer import fp8 as transfer_fp8
from jax_ep.bench.transfer import providers as transfer_providers
from jax_ep.bench.transfer.problem import ROUTINGS, Problem, Shape, make_mesh, make_problem
from jax_ep.bench.transfer.providers import CEILING, Ours

# Launching from the host may take longer than a transfer: a program of chained calls should take a
# millisecond. With so few tokens per rank it has more of them.
LOW_LATENCY_TOKENS = 256
CHAINED_OF_FEW = 64
CHAINED = 8

SHAPES = (Shape(4096, 7168, 256, 8), Shape(4096, 2048, 128, 8), Shape(4096, 4096, 8, 2))
SWEEP_TOKENS = (1, 8, 32, 128, 512, 2048, 4096, 8192, 16384)
SMOKE_SHAPES = (Shape(300, 16, 8, 2), Shape(6, 16, 8, 2))  # with many tokens and with few
SMOKE_SWEEP_TOKENS = (1, 24, 300)


class TransferBenchmark(Benchmark):
    """Configures the harness."""

    name = "transfer"
    operations = (*transfer_providers.OPERATIONS, *transfer_fp8.OPERATIONS)
    default_operations = transfer_providers.OPERATIONS
    providers = (*transfer_providers.PROVIDERS, *transfer_fp8.PROVIDERS)
    shape_type = Shape
    shapes = SHAPES
    smoke_shapes = SMOKE_SHAPES
    variants = ROUTINGS
    variant_option = "routing"
    figures = (Figure("gigabytes_per_second", "GB/s"), Figure("of_ceiling", "of ceiling", ".2f"))
    average = "median"
    sweep = "tokens"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """--sweep, --num-sms, --domain-size and --devices."""
        sweep = "also the first shape with 1 to 16384 tokens per rank"
        parser.add_argument("--sweep", action="store_true", help=sweep)
        positive = harness.parse_positive
        num_sms = "also jax_ep with at most N SMs; may be repeated"
        parser.add_argument("--num-sms", type=positive, action="append", metavar="N", help=num_sms)
        add_domain_size(parser)
        devices = "the first N of this machine's (default: all)"
        parser.add_argument("--devices", type=positive, metavar="N", help=devices)

    def prepare(self, arguments: argparse.Namespace, results: dict[str, Any]) -> None:
        """Adds the sweep's shapes, and checks that the experts divide over the devices."""
        tokens = SMOKE_SWEEP_TOKENS if arguments.smoke else SWEEP_TOKENS
        first = arguments.shape[0]
        swept = [dataclasses.replace(first, tokens=t) for t in tokens if arguments.sweep]
        arguments.shape = list(dict.fromkeys(arguments.shape + swept))
        self.mesh = make_mesh(checked_devices(arguments.devices, arguments.shape))
        check_domain_sizes(arguments.domain_size, self.mesh.size)
        results.update(num_devices=self.mesh.size, description=" ".join((__doc__ or "").split()))

    def make_problem(self, shape: Shape, variant: str, rotated_bytes: float) -> Problem:
        """Random tokens and routes."""
        return make_problem(self.mesh, shape, variant, rotated_bytes)

    def chains(self, shape: Shape) -> tuple[int, ...]:
        """With few tokens single calls are measured, too."""
        return (1, CHAINED_OF_FEW) if shape.tokens <= LOW_LATENCY_TOKENS else (CHAINED,)

    def chosen_providers(self, arguments: argparse.Namespace) -> list[Provider]:
        """jax_ep also with each limit of SMs, and over domains of each size."""
        chosen = super().chosen_providers(arguments)
        if any(provider.name == OURS for provider in chosen):
            chosen += [Ours(limit) for limit in dict.fromkeys(arguments.num_sms or ())]
            sizes = dict.fromkeys(arguments.domain_size or ())
            chosen += [Ours(domain_size=size) for size in sizes]
        return chosen

    def required(self, record: Record) -> Required:
        """Collectives have no redispatch: their dispatch already exchanges no metadata."""
        if record["operation"] in transfer_fp8.OPERATIONS:
            return transfer_fp8.REQUIRED
        if record["operation"] == "redispatch":
            return ((OURS,), (CEILING,))
        ragged = ("lax.ragged_all_to_all 1", "lax.ragged_all_to_all 64")
        return ((OURS,), (CEILING,), ragged, ("lax.all_to_all",), ("all_gather/psum_scatter",))

    def add_figures(self, results: dict[str, Any]) -> None:
        """The case's `remote_bytes` per second, whatever is sent, and that over the ceiling's."""
        for record in results["cases"]:
            ceiling = record["measurements"].get(CEILING, {}).get("seconds")
            for measurement in record["measurements"].values():
                seconds = measurement.get("seconds")
                if seconds is not None:
                    measurement["gigabytes_per_second"] = record["remote_bytes"] / seconds / 1e9
                    measurement["of_ceiling"] = None if ceiling is None else ceiling / seconds


BENCHMARK = TransferBenchmark()


def add_domain_size(parser: argparse.ArgumentParser) -> None:
    """--domain-size, an option of transfers and layers."""
    text = "also jax_ep over NVLink domains of N consecutive ranks each; may be repeated"
    positive = harness.parse_positive
    parser.add_argument("--domain-size", type=positive, action="append", metavar="N", help=text)


def check_domain_sizes(sizes: list[int] | None, num_ranks: int) -> None:
    """Ends the program where domains do not fit."""
    for size in sizes or ():
        if num_ranks % size:
            sys.exit(
                f"--domain-size {size} does not divide {num_ranks} devices; give a divisor of them."
            )


def checked_devices(asked: int | None, shapes: list[Shape]) -> int:
    """Returns how many devices; ends the program where these or the experts do not fit."""
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
