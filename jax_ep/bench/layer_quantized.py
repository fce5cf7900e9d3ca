"""jax_ep's layer by a recipe, with weights that are quantized before the call or in it."""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from jax_ep import quant
from jax_ep.bench.layer_ours import Ours
from jax_ep.bench.layer_problem import Problem
from jax_ep.bench.programs import AXIS
from jax_ep.bench.report import OURS


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
        quantize = functools.partial(quant.quantize_experts, recipe=self.recipe)
        sharded = jax.shard_map(quantize, mesh=problem.mesh, in_specs=P(AXIS), out_specs=P(AXIS))
        weights = problem.sets[0].w_up, problem.sets[0].w_down
        return problem.once("quantized", lambda: jax.jit(sharded)(*weights))


PROVIDERS: tuple[Quantized, ...] = (
    Quantized("Fp8Block128", quant.Recipe(), before=True),
    Quantized(
        "Fp8Block128, quantized dispatch", quant.Recipe(quantized_dispatch=True), before=True
    ),
    Quantized("Fp8Block128, weights quantized in the call", quant.Recipe(), before=False),
)
