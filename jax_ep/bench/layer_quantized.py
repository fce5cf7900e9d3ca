"""jax_ep's layer by a recipe, with weights that are quantized before the call or in it."""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep import quant
from jax_ep.bench.harness import Case, Started
from jax_ep.bench.layer_calls import implementation
from jax_ep.bench.layer_passes import arguments_of, pass_of
from jax_ep.bench.layer_problem import Problem, Shape
from jax_ep.bench.programs import AXIS, start_sharded
from jax_ep.bench.report import OURS


class Quantized:
    """moe_mlp with quantization; on GPUs its kernels or an error."""

    operations: tuple[str, ...] = ("forward", "both")

    def __init__(self, name: str, recipe: quant.Recipe, *, before: bool) -> None:
        self.name = f"{OURS} {name}"
        self.recipe = recipe
        self.before = before

    def applies(self, shape: Shape, weights: str, num_ranks: int) -> bool:
        """To all."""
        return True

    def start(self, case: Case, problem: Problem) -> Started:
        """Compiles it."""

        def layer(x: Any, ids: Any, quantized: Any, weights: Any, up: Any, down: Any) -> jax.Array:
            y, _ = jax_ep.moe_mlp(
                x,
                ids,
                weights,
                up,
                down,
                axis_name=AXIS,
                num_experts=problem.routes.num_experts,
                recv_capacity=problem.routes.recv_capacity,
                quantization=self.recipe,
                quantized_weights=quantized,
                implementation=implementation(),
            )
            return y

        quantized = _quantized(problem, self.recipe) if self.before else None
        arguments = []
        for operands in problem.sets:
            (x, ids), *others = arguments_of(case.operation, operands)
            arguments.append(((x, ids, quantized), *others))
        evidence = "jax_ep.dispatch.v1" if implementation() else None
        compute = pass_of(case.operation, layer)
        return start_sharded(compute, arguments, problem.mesh, case.chained, evidence)


def _quantized(problem: Problem, recipe: quant.Recipe) -> Any:
    """Returns the quantized weights, which all sets of operands share."""
    quantize = functools.partial(quant.quantize_experts, recipe=recipe)
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
