"""The parts of jax_ep's layer, each timed alone, and those of an MLP with dense matmuls.

The sum of the parts is the bound that the whole layer is compared with. The matmuls are the calls
that the layer makes, with what runs in their epilogues.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep.bench.common.benchmark import Case, Started
from jax_ep.bench.common.programs import implementation, sharded, start_sharded
from jax_ep.bench.layer.calls import Calls, Values, has_many_rows, values_of
from jax_ep.bench.layer.problem import Problem, Shape

FORWARD: tuple[str, ...] = ("forward", "both")
BACKWARD: tuple[str, ...] = ("both",)
ACTIVATION = "grouped_matmul_activation"
RHS_GRADIENT = "grouped_matmul_rhs_gradient"
# XLA compiles dozens of Triton kernels to find one that is faster than cuBLAS, if there is one.
CUBLAS = {"xla_gpu_enable_triton_gemm": False}

Arrays = tuple[Any, ...]


@dataclasses.dataclass(eq=False)
class Part:
    """A provider: one call of the layer.

    Attributes:
      name: for reports.
      kind: "transfer", "matmul" or "pass".
      operations: the passes that make the call.
      target: the custom call without "jax_ep." and ".v1"; None for what XLA computes.
      call: one of `Calls`.
      arguments: its arguments; a chain of calls depends on the first.
      dense: the operands of a dense matmul of the same size, of the call's arguments, in which a
        weight is one expert's.
    """

    name: str
    kind: str
    operations: tuple[str, ...]
    target: str | None
    call: Callable[..., Any]
    arguments: Callable[[Values], Arrays]
    dense: Callable[..., Arrays] | None = None

    def applies(self, shape: Shape, weights: str, num_ranks: int) -> bool:
        """The only pass is the cast of float32 weights."""
        return self.kind != "pass" or (weights == "float32" and has_many_rows(shape))

    def start(self, case: Case, problem: Problem) -> Started:
        """Compiles the call by itself, over all ranks."""
        calls = Calls(problem, keep=case.operation == "both")
        if self.kind == "pass":
            arguments: list[Arrays] = [(o.w_up, o.w_down) for o in problem.sets]
        else:
            arguments = [self.arguments(v) for v in values_of(problem)]
        evidence = f"jax_ep.{self.target}.v1" if self.target and implementation() else None

        def call(*arguments: Any) -> Any:
            return self.call(calls, *arguments)

        return start_sharded(call, arguments, problem.mesh, case.chained, evidence)


def _part(
    name: str,
    kind: str,
    operations: tuple[str, ...],
    target: str | None,
    call: Callable[..., Any],
    arguments: Callable[[Values], Arrays],
    dense: Callable[..., Arrays] | None = None,
) -> Part:
    return Part(f"part: {name}", kind, operations, target, call, arguments, dense)


PARTS: tuple[Part, ...] = (
    _part("cast of weights", "pass", FORWARD, None, Calls.cast, lambda v: v.operands[-2:]),
    _part(
        "dispatch",
        "transfer",
        FORWARD,
        "dispatch",
        Calls.dispatch,
        lambda v: (v.operands.x, v.operands.topk_ids, v.operands.topk_weights),
    ),
    _part(
        "up",
        "matmul",
        FORWARD,
        ACTIVATION,
        Calls.up,
        lambda v: (v.rows, v.operands.w_up, v.plan),
        lambda rows, w_up, *_: (rows, w_up),
    ),
    _part(
        "down",
        "matmul",
        FORWARD,
        ACTIVATION,
        Calls.down,
        lambda v: (v.activations, v.operands.w_down, v.row_weights, v.plan),
        lambda activations, w_down, *_: (activations, w_down),
    ),
    _part("combine", "transfer", FORWARD, "combine", Calls.combine, lambda v: (v.y, v.plan)),
    _part(
        "dispatch of gradients",
        "transfer",
        BACKWARD,
        "redispatch",
        Calls.redispatch,
        lambda v: (v.operands.out_bar, v.plan),
    ),
    _part(
        "dispatch of x again",
        "transfer",
        BACKWARD,
        "redispatch",
        Calls.redispatch,
        lambda v: (v.operands.x, v.plan, v.operands.topk_weights),
    ),
    _part(
        "activation gradient",
        "matmul",
        BACKWARD,
        f"{ACTIVATION}_gradient",
        Calls.activation_gradient,
        lambda v: (v.y_bar, v.operands.w_down, v.pre_activation, v.row_weights, v.plan),
        lambda y_bar, w_down, *_: (y_bar, w_down.T),
    ),
    _part(
        "input gradient",
        "matmul",
        BACKWARD,
        "grouped_matmul",
        Calls.input_gradient,
        lambda v: (v.pre_activation_bar, v.operands.w_up, v.plan),
        lambda pre_activation_bar, w_up, _: (pre_activation_bar, w_up.T),
    ),
    _part(
        "gradient of up",
        "matmul",
        BACKWARD,
        RHS_GRADIENT,
        Calls.weight_gradient,
        lambda v: (v.rows, v.pre_activation_bar, v.plan),
        lambda rows, pre_activation_bar, _: (rows.T, pre_activation_bar),
    ),
    _part(
        "gradient of down",
        "matmul",
        BACKWARD,
        RHS_GRADIENT,
        Calls.weight_gradient,
        lambda v: (v.activations, v.y_bar, v.plan),
        lambda activations, y_bar, _: (activations.T, y_bar),
    ),
    _part(
        "combine of gradients",
        "transfer",
        BACKWARD,
        "combine",
        Calls.combine_gradients,
        lambda v: (v.rows_bar, v.row_weights_bar, v.operands.x, v.plan),
    ),
)


@dataclasses.dataclass(eq=False)
class Dense:
    """A provider: what an MLP with one expert's matrices for all rows makes of a part.

    Attributes:
      name: for reports.
      operations: the passes that have the part.
      call: a matmul of the part's size by cuBLAS, or the pass of its epilogue as XLA's fusion.
      arguments: its arguments.
      is_matmul: whether it is a matmul.
    """

    name: str
    operations: tuple[str, ...]
    call: Callable[..., Any]
    arguments: Callable[[Values], Arrays]
    is_matmul: bool

    def applies(self, shape: Shape, weights: str, num_ranks: int) -> bool:
        """With few rows per expert a matmul reads its matrix, and the dense one reads only one."""
        return has_many_rows(shape)

    def start(self, case: Case, problem: Problem) -> Started:
        """Compiles it by itself, over all ranks."""
        values = values_of(problem)
        select = jax.jit(sharded(lambda *weights: tuple(w[0] for w in weights), problem.mesh))
        weights = values[0].operands[-2:]
        w_up, w_down = problem.once("one expert", lambda: select(*weights))
        arguments = [
            self.arguments(v._replace(operands=v.operands._replace(w_up=w_up, w_down=w_down)))
            for v in values
        ]
        return start_sharded(
            self.call, arguments, problem.mesh, case.chained, None, compiler_options=CUBLAS
        )


def _dense_matmul(part: Part) -> Dense:
    operands = part.dense
    assert operands is not None

    def call(*arguments: Any) -> jax.Array:
        return jnp.dot(*operands(*arguments))

    name = part.name.replace("part", "dense")
    return Dense(name, part.operations, call, part.arguments, is_matmul=True)


def _swiglu(pre_activation: jax.Array) -> jax.Array:
    gate, up = jnp.split(pre_activation.astype(jnp.float32), 2, axis=-1)
    return (jax.nn.silu(gate) * up).astype(pre_activation.dtype)


def _swiglu_gradient(pre_activation: jax.Array, activations_bar: jax.Array) -> Any:
    """Returns the gradient, and the activations again for the gradient of down."""
    activations, backward = jax.vjp(_swiglu, pre_activation)
    return *backward(activations_bar), activations


DENSE: tuple[Dense, ...] = (
    *(_dense_matmul(part) for part in PARTS if part.kind == "matmul"),
    Dense("dense: SwiGLU", FORWARD, _swiglu, lambda v: (v.pre_activation,), is_matmul=False),
    Dense(
        "dense: gradient of SwiGLU",
        BACKWARD,
        _swiglu_gradient,
        lambda v: (v.pre_activation, v.activations),
        is_matmul=False,
    ),
)
