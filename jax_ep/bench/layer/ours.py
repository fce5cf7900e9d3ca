"""jax_ep's layer, with options of moe_mlp."""

from __future__ import annotations

from typing import Any

import jax

import jax_ep
from jax_ep.bench.common.benchmark import Case, Started
from jax_ep.bench.common.programs import AXIS, implementation
from jax_ep.bench.layer.passes import start_layer
from jax_ep.bench.layer.problem import Problem, Shape


class Ours:
    """moe_mlp; on GPUs its kernels or an error."""

    def __init__(self, name: str, operations: tuple[str, ...], **options: Any) -> None:
        self.name = name
        self.operations = operations
        self.options = options

    def applies(self, shape: Shape, weights: str, num_ranks: int) -> bool:
        """To all."""
        return True

    def matrices(self, up: jax.Array, down: jax.Array) -> tuple[Any, Any]:
        """Returns those that the call gets."""
        return up, down

    def quantized_weights(self, problem: Problem) -> Any:
        """Returns those that are quantized before the call, or None."""
        return None

    def start(self, case: Case, problem: Problem) -> Started:
        """Compiles it."""
        chosen = implementation(problem.mesh, self.options.get("nvlink_domain_size"))

        def layer(x: Any, ids: Any, quantized: Any, weights: Any, up: Any, down: Any) -> jax.Array:
            y, _ = jax_ep.moe_mlp(
                x,
                ids,
                weights,
                *self.matrices(up, down),
                axis_name=AXIS,
                num_experts=problem.routes.num_experts,
                recv_capacity=problem.routes.recv_capacity,
                quantized_weights=quantized,
                implementation=chosen,
                **self.options,
            )
            return y

        evidence = "jax_ep.dispatch.v1" if chosen == "cuda" else None
        return start_layer(layer, case, problem, evidence, self.quantized_weights(problem))
