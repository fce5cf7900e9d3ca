"""The calls that jax_ep's layer makes, each as a function of one rank's arrays."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax

import jax_ep
from jax_ep._src.matmul.grouped_matmul_activation import bind_activation, bind_activation_gradient
from jax_ep._src.matmul.primitives import CAST_ROWS, bind_matmul, bind_rhs_gradient
from jax_ep._src.mlp.params import GroupedMlpParams
from jax_ep._src.transfer.plan import Plan
from jax_ep.bench.common.programs import AXIS, implementation, sharded
from jax_ep.bench.layer.problem import Operands, Problem, Shape


def has_many_rows(shape: Shape) -> bool:
    """Whether float32 weights are cast. With fewer rows a matmul takes the time to read them."""
    return shape.rows > CAST_ROWS * shape.experts


class Values(NamedTuple):
    """The arrays of a layer, from one set of operands."""

    operands: Operands
    plan: Plan
    rows: jax.Array  # [M, H]
    row_weights: jax.Array  # float32[M]
    activations: jax.Array  # [M, F]; weighted where there is a backward pass
    y: jax.Array  # [M, H]
    pre_activation: jax.Array  # [M, 2F]
    y_bar: Any = None  # [M, H]; from here on of the backward pass
    pre_activation_bar: Any = None  # [M, 2F]
    rows_bar: Any = None  # [M, H]
    row_weights_bar: Any = None  # float32[M]


@dataclasses.dataclass(frozen=True)
class Calls:
    """The calls of one problem.

    Attributes:
      problem: whose mesh, routes and dtypes they have.
      keep: whether the pre-activation is kept, for a backward pass.
    """

    problem: Problem
    keep: bool

    @property
    def params(self) -> GroupedMlpParams:
        """Those that moe_mlp gives its experts."""
        return GroupedMlpParams(
            activation="swiglu", zero_tail=False, num_sms=0, implementation=implementation()
        )

    def cast(self, w_up: jax.Array, w_down: jax.Array) -> Any:
        """Casts the weights to the dtype of the tokens."""
        dtype = self.problem.sets[0].x.dtype
        return w_up.astype(dtype), w_down.astype(dtype)

    def dispatch(self, x: jax.Array, ids: jax.Array, weights: jax.Array) -> jax_ep.Dispatched:
        """Sends the tokens to their experts."""
        return jax_ep.dispatch(
            x,
            ids,
            weights,
            num_experts=self.problem.routes.num_experts,
            axis_name=AXIS,
            recv_capacity=self.problem.routes.recv_capacity,
            zero_tail=False,
            implementation=implementation(),
        )

    def redispatch(self, x: jax.Array, plan: Plan, weights: Any = None) -> Any:
        """Sends tokens again; without weights these are gradients of the result."""
        sent = jax_ep.redispatch(x, plan, weights, implementation=implementation())
        return sent.rows, sent.row_weights

    def combine(self, y: jax.Array, plan: Plan) -> jax.Array:
        """Sums the outputs of each token's experts."""
        return jax_ep.combine(y, plan, None, implementation=implementation())

    def combine_gradients(
        self, rows_bar: jax.Array, row_weights_bar: jax.Array, x: jax.Array, plan: Plan
    ) -> Any:
        """Sums the gradients of each token's rows, and returns those of its weights."""
        weights = jax.numpy.zeros_like(plan.kept, row_weights_bar.dtype)
        _, backward = jax.vjp(lambda x, weights: self.redispatch(x, plan, weights), x, weights)
        return backward((rows_bar, row_weights_bar))

    def up(self, rows: jax.Array, w_up: jax.Array, plan: Plan) -> Any:
        """Multiplies by gate and up, and applies SwiGLU."""
        params = self.params.epilogue("swiglu")
        sizes = plan.group_sizes
        return bind_activation(rows, w_up, sizes, None, None, params, keep_pre_activation=self.keep)

    def down(
        self, activations: jax.Array, w_down: jax.Array, row_weights: jax.Array, plan: Plan
    ) -> jax.Array:
        """Multiplies by down and by the routing weights."""
        params = self.params.epilogue("none")
        sizes = plan.group_sizes
        return bind_activation(activations, w_down, sizes, None, row_weights, params)[0]

    def activation_gradient(
        self,
        y_bar: jax.Array,
        w_down: jax.Array,
        pre_activation: jax.Array,
        row_weights: jax.Array,
        plan: Plan,
    ) -> Any:
        """Multiplies by down transposed, and applies the gradient of SwiGLU."""
        params = self.params.epilogue("swiglu")
        sizes = plan.group_sizes
        return bind_activation_gradient(y_bar, w_down, sizes, pre_activation, row_weights, params)

    def input_gradient(self, pre_activation_bar: jax.Array, w_up: jax.Array, plan: Plan) -> Any:
        """Multiplies by gate and up transposed."""
        params = self.params.matmul(pre_activation_bar.dtype, transpose_rhs=True)
        return bind_matmul(pre_activation_bar, w_up, plan.group_sizes, params)

    def weight_gradient(self, lhs: jax.Array, out_bar: jax.Array, plan: Plan) -> jax.Array:
        """Contracts over the rows of each expert."""
        params = self.params.matmul(self.problem.weight_dtype)
        return bind_rhs_gradient(lhs, out_bar, plan.group_sizes, params)


def values_of(problem: Problem) -> list[Values]:
    """Returns the arrays of a layer for every set, with weights as its matmuls read them."""

    def make() -> list[Values]:
        calls = Calls(problem, keep=True)
        matrices = problem.sets[0].w_up, problem.sets[0].w_down
        if has_many_rows(problem.shape) and problem.weight_dtype == "float32":
            matrices = jax.jit(sharded(calls.cast, problem.mesh))(*matrices)
        compute = jax.jit(sharded(_computation(calls), problem.mesh))
        values = []
        for operands in problem.sets:
            operands = operands._replace(w_up=matrices[0], w_down=matrices[1])
            values.append(Values(operands, **jax.block_until_ready(compute(operands))))
        return values

    values: list[Values] = problem.once("values", make)
    return values


def _computation(calls: Calls) -> Any:
    def compute(o: Operands) -> dict[str, Any]:
        sent = calls.dispatch(o.x, o.topk_ids, o.topk_weights)
        plan, rows, row_weights = sent.plan, sent.rows, sent.row_weights
        assert row_weights is not None  # as weights were given
        activations, pre_activation = calls.up(rows, o.w_up, plan)
        values = {"plan": plan, "rows": rows, "row_weights": row_weights}
        values["pre_activation"] = pre_activation
        y = calls.down(activations, o.w_down, row_weights, plan)
        if not calls.problem.backward:
            return values | {"y": y, "activations": activations}
        y_bar, _ = calls.redispatch(o.out_bar, plan)
        pre_activation_bar, activations, row_dots = calls.activation_gradient(
            y_bar, o.w_down, pre_activation, row_weights, plan
        )
        return values | {
            "y": y,
            "activations": activations,
            "y_bar": y_bar,
            "pre_activation_bar": pre_activation_bar,
            "rows_bar": calls.input_gradient(pre_activation_bar, o.w_up, plan),
            "row_weights_bar": row_dots.sum(1),
        }

    return compute
