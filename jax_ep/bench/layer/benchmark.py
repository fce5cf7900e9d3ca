"""One mixture-of-experts block beside its own parts and beside layers in plain JAX, in one process.

The passes are "forward", and "both": forward and backward, with the gradients of tokens, routing
weights and expert weights. Routes and routing weights are given: the router is not in any time.
Tokens are bfloat16; expert weights are bfloat16, or float32 masters. Every rank has T tokens and
the experts that one rank of four has, so with one GPU it computes T * K rows, as each of four does.
Routing is uniform, and nothing is dropped, but by the einsum form.

Each call of jax_ep's layer is timed alone, too ("part"), and so is what an MLP with dense matmuls
makes of it ("dense"): cuBLAS's matmul, and SwiGLU and its gradient, each a fusion of XLA. "/ sum"
is a time over that of all parts, "/ dense sum" over that of transfers, casts and all that is dense,
"/ dense matmuls" over the same without SwiGLU. With up to 64 tokens "/ reading" is a time over that
of the transfers and of reading once, at the rate of a copy, the weights of experts that have rows.
All run in short rounds, in changing order; the first does not count, and a ratio is the median over
the others. Calls with few tokens, and all on several GPUs, are chained in one program, which XLA
captures in a CUDA graph.
Peak memory is what the compiler allocates; "/ plain peak" is that of jax_ep over the least of the
layers in plain JAX, which have the same capacity.
"""

from __future__ import annotations

import argparse
import itertools
import pathlib
import random
from typing import Any

import jax

from jax_ep.bench.common import energy, harness
from jax_ep.bench.common.benchmark import Benchmark, Case, Provider, Required, Started
from jax_ep.bench.common.report import OURS, Figure, Record
from jax_ep.bench.layer import figures as layer_figures
from jax_ep.bench.layer import plot as layer_plot
from jax_ep.bench.layer import providers as layer_providers
from jax_ep.bench.layer.ours import Ours
from jax_ep.bench.layer.parts import Dense, Part
from jax_ep.bench.layer.problem import MODELS, Problem, Shape, make_problem
from jax_ep.bench.layer.quantized import IN_FOUR_BITS
from jax_ep.bench.layer.quantized import LAYERS as QUANTIZED_LAYERS
from jax_ep.bench.layer.quantized import PROVIDERS as QUANTIZED
from jax_ep.bench.layer.torch import Torch
from jax_ep.bench.matmul.benchmark import COPIED_BYTES, copy_bytes_per_second, relative_difference
from jax_ep.bench.transfer.benchmark import (
    add_domain_size,
    check_domain_sizes,
    checked_devices,
)
from jax_ep.bench.transfer.problem import make_mesh

TOKENS = (4096, 128, 1024, 8192)
DECODED_TOKENS = (1, 4, 16, layer_figures.MAX_DECODED_TOKENS)
SMOKE_SHAPES = (Shape(160, 32, 16, 4, 2),)  # with enough rows for dense matmuls and casts
SMOKE_CHAINED = 2
FEW_TOKENS, SOME_TOKENS = 256, 1024
CHAINED_OF_FEW, CHAINED_OF_SOME = 16, 4
ROUNDS, QUICK_ROUNDS, SMOKE_ROUNDS = 8, 4, 2
ITERATIONS = 6  # each takes at least 10 ms
SETTLING_SECONDS = 2
QUICK_BASELINES = ("sort, tokamax triton, gather", "all_gather, tokamax triton, psum_scatter")
MAX_DIFFERENCE = 0.02  # relative to a result's norm
MAX_FP8_DIFFERENCE = 0.12  # of FP8 matmuls from bfloat16: several roundings of 2.6 %
MAX_FOUR_BIT_DIFFERENCE = 0.3  # MXFP4 weights round by 12 %, several times
IN_ROUNDS = Part | Dense | Ours
TRACED_CALLS = 3


class LayerBenchmark(Benchmark):
    """Configures the harness."""

    name = "layer"
    operations = layer_providers.OPERATIONS
    providers = layer_providers.PROVIDERS
    shape_type = Shape
    shapes = tuple(Shape(tokens, *MODELS[name]) for name in MODELS for tokens in TOKENS)
    smoke_shapes = SMOKE_SHAPES
    variants = ("bfloat16", "float32")
    variant_option = "weights"
    figures = (
        Figure("tflops", "TFLOP/s"),
        Figure("of_sum", "/ sum", ".3f"),
        Figure("of_dense_sum", "/ dense sum", ".3f"),
        Figure("of_dense_matmuls", "/ dense matmuls", ".3f"),
        Figure("of_reading", "/ reading", ".2f"),
        *(
            Figure(f"speedup_{n}", f"bfloat16 / {n} microbatch{'es' * (n > 1)}", ".2f")
            for n in layer_figures.MICROBATCHES
        ),
        *energy.FIGURES,
        Figure("peak_gib", "peak GiB", ".2f"),
        Figure("of_plain_peak", "/ plain peak", ".3f"),
    )
    average = "mean"  # the power limit is kept on average
    rounds = ROUNDS
    iterations = ITERATIONS
    warm_up_seconds = 0
    settling_seconds = SETTLING_SECONDS
    has_energy = True

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Adds what to measure, and --profile."""
        positive = harness.parse_positive
        layers = [p.name for p in self.providers if not isinstance(p, Part | Dense)]
        names = [name for name in layers if not name.startswith((OURS, "part"))]
        for option, choices, text in (
            ("--shapes", tuple(MODELS), "the models (default: all)"),
            ("--passes", self.operations, "(default: all)"),
            ("--baselines", names, "(default: all); none: give the option alone"),
        ):
            parser.add_argument(
                option,
                nargs="*",
                choices=choices,
                metavar="NAME",
                help=(f"{text}: {'; '.join(choices)}"),
            )
        tokens = f"tokens per rank (default: {' '.join(map(str, TOKENS))})"
        parser.add_argument("--tokens", type=positive, nargs="+", metavar="T", help=tokens)
        parser.add_argument(
            "--decode",
            action="store_true",
            help=(f"the forward pass with {', '.join(map(str, DECODED_TOKENS))} tokens per rank"),
        )
        quantization = "jax_ep's layer with FP8 matmuls and MXFP4 weights, too"
        parser.add_argument("--quantization", action="store_true", help=quantization)
        quick = "deepseek-v3, 4096 tokens, few baselines and short rounds: three minutes at most"
        parser.add_argument("--quick", action="store_true", help=quick)
        add_domain_size(parser)
        devices = "the first N of this machine's (default: all)"
        parser.add_argument("--devices", type=positive, metavar="N", help=devices)
        profile = "leaves a Perfetto trace of jax_ep's calls in every case"
        parser.add_argument("--profile", type=pathlib.Path, metavar="DIR", help=profile)

    def prepare(self, arguments: argparse.Namespace, results: dict[str, Any]) -> None:
        """Chooses the shapes, passes and providers, and measures a copy."""
        if arguments.quick:
            self._make_quick(arguments)
        if arguments.smoke:
            self.rounds, self.settling_seconds = SMOKE_ROUNDS, 0  # type: ignore[misc]
        if arguments.decode:
            arguments.passes = arguments.passes or ["forward"]
            arguments.tokens = arguments.tokens or list(DECODED_TOKENS)
        if arguments.shapes or arguments.tokens:
            models = arguments.shapes or list(MODELS)
            tokens = arguments.tokens or TOKENS
            arguments.shape = [Shape(t, *MODELS[name]) for name in models for t in tokens]
        arguments.operation = arguments.operation or arguments.passes
        if arguments.baselines is not None:
            own = arguments.provider or [
                p.name
                for p in self.providers
                if (p in QUANTIZED and arguments.quantization)
                or (isinstance(p, IN_ROUNDS) and p not in QUANTIZED)
            ]
            arguments.provider = [*own, *arguments.baselines]
        self.mesh = make_mesh(checked_devices(arguments.devices, []))
        check_domain_sizes(arguments.domain_size, self.mesh.size)
        self.profile, self.smoke = arguments.profile, arguments.smoke
        self.backward = "both" in (arguments.operation or self.operations)
        copied = 2**20 if arguments.smoke else COPIED_BYTES
        results.update(
            num_devices=self.mesh.size,
            description=" ".join((__doc__ or "").split()),
            copy_bytes_per_second=copy_bytes_per_second(copied),
        )

    def _make_quick(self, arguments: argparse.Namespace) -> None:
        self.rounds = QUICK_ROUNDS  # type: ignore[misc]
        if not arguments.smoke:
            arguments.shapes = arguments.shapes or ["deepseek-v3"]
            arguments.tokens = arguments.tokens or [TOKENS[0]]
        arguments.variant = arguments.variant or ["bfloat16"]
        if arguments.baselines is None:
            arguments.baselines = list(QUICK_BASELINES)

    def make_problem(self, shape: Shape, variant: str, rotated_bytes: float) -> Problem:
        """Random tokens and weights."""
        return make_problem(self.mesh, shape, variant, rotated_bytes, backward=self.backward)

    def chains(self, shape: Shape) -> tuple[int, ...]:
        """Launching may take longer than a transfer of few tokens, or of many on several GPUs."""
        if self.smoke:
            return (SMOKE_CHAINED,)
        if shape.tokens <= FEW_TOKENS:
            return (CHAINED_OF_FEW,)
        is_launched_late = shape.tokens <= SOME_TOKENS or self.mesh.size > 1
        return (CHAINED_OF_SOME,) if is_launched_late else (1,)

    def applies(self, provider: Provider, case: Case) -> bool:
        """Asks the provider."""
        applies: bool = provider.applies(case.shape, case.variant, self.mesh.size)  # type: ignore[attr-defined]
        return applies

    def chosen_providers(self, arguments: argparse.Namespace) -> list[Provider]:
        """Leaves out the quantized layers unless they are asked for."""
        named = arguments.provider or []
        sizes = dict.fromkeys(arguments.domain_size or ())
        over_domains: list[Provider] = [
            Ours(f"{OURS} domains of {size}", self.operations, nvlink_domain_size=size)
            for size in sizes
        ]
        chosen = [
            p
            for p in super().chosen_providers(arguments)
            if p not in QUANTIZED or arguments.quantization or p.name in named
        ]
        return chosen + over_domains

    def order(self, chosen: list[Provider]) -> list[Provider]:
        """Many short rounds of all: the clocks follow the power, and so change slowly.

        After the first round each has an order of its own, so that nothing always follows a call
        that takes little power, and so begins with high clocks.
        """
        shuffle = random.Random(0)
        others = [shuffle.sample(chosen, len(chosen)) for _ in range(self.rounds - 1)]
        return chosen + list(itertools.chain.from_iterable(others))

    def check(self, started: Started, name: str, ours: Started | None) -> None:
        """Compares results with those of jax_ep. The einsum form drops, parts are not layers."""
        if ours is None or ours is started or name.startswith(("part", "dense", "einsum")):
            return
        results = [jax.tree.leaves(s.to_jax(s.call(s.arguments[0]))) for s in (started, ours)]
        differences = [float(difference) for difference in relative_differences(*results)]
        started.facts["relative_differences"] = differences
        of_quantized = dict.fromkeys((p.name for p in QUANTIZED_LAYERS), MAX_FP8_DIFFERENCE)
        of_quantized[IN_FOUR_BITS.name] = MAX_FOUR_BIT_DIFFERENCE
        largest = of_quantized.get(name, MAX_DIFFERENCE)
        if not max(differences) <= largest:  # NaN is not
            text = ", ".join(f"{d:.2g}" for d in differences)
            raise ArithmeticError(f"its results differ from those of jax_ep by {text}")

    def starts_early(self, provider: Provider) -> bool:
        """All but torch's, whose compiler keeps state of its own."""
        return not isinstance(provider, Torch)

    def measures_energy(self, name: str) -> bool:
        """Returns whether it is a layer, not a part of one."""
        return not name.startswith(("part", "dense"))

    def finish(self, case: Case, started: dict[str, Started]) -> None:
        """Traces some calls."""
        if self.profile is None or OURS not in started:
            return
        ours = started[OURS]
        folder = self.profile / "".join(c if c.isalnum() else "_" for c in case.record()["key"])
        with jax.profiler.trace(folder, create_perfetto_trace=True):
            for index in range(TRACED_CALLS):
                with jax.profiler.StepTraceAnnotation("layer", step_num=index):
                    result = ours.call(ours.arguments[index % len(ours.arguments)])
                    jax.block_until_ready(result)

    def required(self, record: Record) -> Required:
        """All parts, and a baseline; torch and TransformerEngine may be missing."""
        case = _case_of(record)
        parts = [
            (p.name,)
            for p in self.providers
            if isinstance(p, Part) and case.operation in p.operations and self.applies(p, case)
        ]
        baselines = [
            p.name
            for p in self.providers
            if isinstance(p, layer_providers.Baseline) and self.applies(p, case)
        ]
        return ((OURS,), *parts, tuple(baselines))

    def add_figures(self, results: dict[str, Any]) -> None:
        """Adds the figures, and the sums of the parts to every case."""
        chained = SMOKE_CHAINED if results["smoke"] else 1
        for record in results["cases"]:
            case = _case_of(record)
            applying = [p for p in self.providers if case.operation in p.operations]
            applying = [p for p in applying if self.applies(p, case)]
            rate = results["copy_bytes_per_second"]
            layer_figures.add_ratios(record, case, applying, rate)
            layer_figures.add_speedups(record)
            if case.chained == chained:
                layer_figures.add_peaks(record, applying)

    def plot(self, results: dict[str, Any], path: pathlib.Path) -> None:
        """Bars of where the time goes."""
        layer_plot.plot(results, path)


@jax.jit
def relative_differences(some: list[jax.Array], others: list[jax.Array]) -> list[jax.Array]:
    """Returns `relative_difference` of all pairs, by one program."""
    return [relative_difference(a, b) for a, b in zip(some, others, strict=True)]


def _case_of(record: Record) -> Case:
    shape = Shape(**record["sizes"])
    return Case(record["operation"], shape, record["variant"], record["chained"])


BENCHMARK = LayerBenchmark()
