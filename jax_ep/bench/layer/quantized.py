"""jax_ep's layer by a recipe, with weights that are quantized before the call or in it."""

from __future__ import annotations

import functools
from typing import Any

import jax

from jax_ep import quant
from jax_ep.bench.common.benchmark import Case, Provider, Started
from jax_ep.bench.common.programs import implementation, sharded, start_sharded
from jax_ep.bench.common.report import OURS
from jax_ep.bench.layer.ours import Ours
from jax_ep.bench.layer.problem import Problem, Shape


class Quantized(Ours):
    """moe_mlp by a recipe."""

    def __init__(self, name: str, recipe: quant.Recipe, *, before: bool) -> None:
        super().__init__(f"{OURS} {name}", ("forward", "both"), quantization=recipe)
        self.recipe = recipe
        self.before = before

    def quantized_weights(self, problem: Problem) -> Any:
        """Returns the quantized weights, which all sets of operands share."""
        if not self.before:
            return None
        quantize = functools.partial(quant.quantize_experts, quantization=self.recipe)
        compute = jax.jit(sharded(quantize, problem.mesh))
        weights = problem.sets[0].w_up, problem.sets[0].w_down
        return problem.once("quantized", lambda: compute(*weights))


class InFourBits(Ours):
    """moe_mlp with experts in MXFP4, and bfloat16 rows."""

    def __init__(self) -> None:
        self.recipe = quant.WeightsOnly(quant.MxFp4())
        super().__init__(f"{OURS} MxFp4 weights", ("forward",), quantization=self.recipe)

    def matrices(self, up: jax.Array, down: jax.Array) -> tuple[Any, Any]:
        """Returns none."""
        return None, None

    def quantized_weights(self, problem: Problem) -> Any:
        """Returns the quantized weights, which all sets of operands share."""
        quantize = functools.partial(
            quant.quantize_experts, quantization=self.recipe, implementation="xla"
        )
        compute = jax.jit(sharded(quantize, problem.mesh))
        weights = problem.sets[0].w_up, problem.sets[0].w_down
        return problem.once("in four bits", lambda: compute(*weights))


class Quantizing:
    """quantize_experts, which a training step calls once for all of its microbatches."""

    name = "part: quantizing of weights"
    operations: tuple[str, ...] = ("both",)

    def applies(self, shape: Shape, weights: str, num_ranks: int) -> bool:
        """To all."""
        return True

    def start(self, case: Case, problem: Problem) -> Started:
        """Compiles it by itself, over all ranks."""

        def quantize(w_up: jax.Array, w_down: jax.Array) -> Any:
            return quant.quantize_experts(
                w_up, w_down, quant.Recipe(), implementation=implementation()
            )

        arguments = [(o.w_up, o.w_down) for o in problem.sets]
        return start_sharded(quantize, arguments, problem.mesh, case.chained, evidence=None)


QUANTIZING = Quantizing()
LAYERS: tuple[Quantized, ...] = (
    Quantized("Fp8Block128", quant.Recipe(), before=True),
    Quantized(
        "Fp8Block128, quantized dispatch", quant.Recipe(quantized_dispatch=True), before=True
    ),
    Quantized(
        "Fp8Block128, quantized dispatch and cotangents",
        quant.Recipe(quantized_dispatch=True, quantized_cotangents=True),
        before=True,
    ),
    Quantized(
        "Fp8Block128, quantized weight gradients",
        quant.Recipe(quantized_weight_gradients=True),
        before=True,
    ),
    Quantized(
        "Fp8Block128, quantized throughout",
        quant.Recipe(
            quantized_dispatch=True, quantized_cotangents=True, quantized_weight_gradients=True
        ),
        before=True,
    ),
    Quantized("Fp8Block128, weights quantized in the call", quant.Recipe(), before=False),
)
IN_FOUR_BITS = InFourBits()
PROVIDERS: tuple[Provider, ...] = (*LAYERS, IN_FOUR_BITS, QUANTIZING)
