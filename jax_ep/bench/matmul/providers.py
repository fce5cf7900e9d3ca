"""The providers of grouped matmuls. Those from outside JAX are imported when they start.

Tokamax 0.0.14 is the newest with both kinds of kernels beside torch 2.11: later ones write their
Triton kernels for jax-triton, whose current version needs a newer triton than torch's.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jax_ep
from jax_ep.bench.common import timing
from jax_ep.bench.common.benchmark import Case, Provider, Started
from jax_ep.bench.common.programs import start_jax

OPERATIONS: tuple[str, ...] = ("forward", "input_gradient", "weight_gradient")
CONTRACTED = {"forward": (1, 1), "input_gradient": (1, 2), "weight_gradient": (0, 0)}

Operands = Any  # matmul.Operands
Computation = Callable[[Operands], jax.Array]


class Computed:
    """A provider that is a JAX function for each operation."""

    operations: tuple[str, ...] = OPERATIONS

    def __init__(self, name: str, computation: Callable[[str], Computation]):
        self.name: str = name
        self.computation = computation

    def start(self, case: Case, problem: list[Operands]) -> Started:
        """Compiles one operation."""
        return start_jax(self.computation(case.operation), problem)


def ours(operation: str) -> Computation:
    """jax_ep.grouped_matmul; on a GPU its kernels or an error."""
    implementation = "cuda" if jax.default_backend() == "gpu" else None
    matmul = functools.partial(jax_ep.grouped_matmul, implementation=implementation)

    def forward(x: Operands) -> jax.Array:
        return matmul(x.lhs, x.rhs, x.sizes)

    def input_gradient(x: Operands) -> jax.Array:
        return matmul(x.out_gradient, x.rhs, x.sizes, transpose_rhs=True)

    weight_gradient = gradient(forward, "rhs")
    return dict(zip(OPERATIONS, (forward, input_gradient, weight_gradient), strict=True))[operation]


def ragged_dot(operation: str) -> Computation:
    """jax.lax.ragged_dot and its gradients."""

    def forward(x: Operands) -> jax.Array:
        return jax.lax.ragged_dot(x.lhs, x.rhs, x.sizes)

    gradients = gradient(forward, "lhs"), gradient(forward, "rhs")
    return dict(zip(OPERATIONS, (forward, *gradients), strict=True))[operation]


def dense(operation: str) -> Computation:
    """jnp.dot with the first group's matrix for all rows: as many products, and no groups."""
    computations: dict[str, Computation] = {
        "forward": lambda x: jnp.dot(x.lhs, x.rhs[0]),
        "input_gradient": lambda x: jnp.dot(x.out_gradient, x.rhs[0].T),
        "weight_gradient": lambda x: jnp.dot(x.lhs.T, x.out_gradient),
    }
    return computations[operation]


class Dense(Computed):
    """`dense`, with the matrix sliced before it is timed."""

    def start(self, case: Case, problem: list[Operands]) -> Started:
        """Compiles one dense matmul."""
        sets = [x._replace(rhs=jax.block_until_ready(x.rhs[:1])) for x in problem]
        return super().start(case, sets)


def gradient(forward: Computation, argument: str) -> Computation:
    """Returns the gradient of `forward` in one argument; what else it computes is dead code."""

    def backward(x: Operands) -> jax.Array:
        _, pull_back = jax.vjp(
            lambda value: forward(x._replace(**{argument: value})), getattr(x, argument)
        )
        return pull_back(x.out_gradient)[0]

    return backward


class Tokamax:
    """tokamax.ragged_dot by one kind of kernels, the fastest of a few configurations.

    Where tokamax has no tuned configuration (an H200) it takes a fixed one, and its own search
    compiles hundreds per shape. `configs` are tried beside its choice: the most frequent winners in
    its data/autotuning/nvidia_h100_80gb_hbm3.
    """

    operations: tuple[str, ...] = OPERATIONS

    def __init__(self, kind: str, implementation: str, configs: tuple[dict[str, Any], ...]):
        self.name = f"tokamax {kind}"
        self.implementation = implementation
        self.configs = configs
        self._fastest: dict[Any, Any] = {}

    def start(self, case: Case, problem: list[Operands]) -> Started:
        """Compiles the configuration that was fastest for the first groups of such operands."""
        key = case.operation, problem[0].lhs.shape, problem[0].rhs.shape
        if key not in self._fastest:
            self._fastest[key] = self._tune(case.operation, problem)
        return self._start(case.operation, problem, self._fastest[key])

    def _tune(self, operation: str, operands: list[Operands]) -> dict[str, Any] | None:
        def seconds(config: dict[str, Any] | None) -> list[float]:
            started = self._start(operation, operands, config)
            return timing.device_times(started.call, started.arguments, timing.TUNING_ITERATIONS)

        return timing.fastest((None, *self.configs), seconds)

    def _start(
        self, operation: str, operands: list[Operands], config: dict[str, Any] | None
    ) -> Started:
        matmul = self._general(config)

        def compute(x: Operands) -> jax.Array:
            left, right = {
                "forward": (x.lhs, x.rhs),
                "input_gradient": (x.out_gradient, x.rhs),
                "weight_gradient": (x.lhs, x.out_gradient),
            }[operation]
            return matmul(operation, left, right, x.sizes)

        started = start_jax(compute, operands)
        started.facts["config"] = config  # None is tokamax's own choice
        return started

    def _general(self, config: dict[str, Any] | None) -> Callable[..., jax.Array]:
        """Returns a function of an operation, its left and right operand, and the group sizes."""
        # It warns of every shape for which it has no tuned configuration.
        logging.getLogger("absl").setLevel(logging.ERROR)
        tokamax = importlib.import_module("tokamax")
        # The only way to a configuration; tokamax.ragged_dot takes such an object.
        implementations = importlib.import_module("tokamax._src.ops.ragged_dot.api").IMPLEMENTATIONS
        if self.implementation not in implementations:
            raise NotImplementedError(
                f"tokamax {tokamax.__version__} has no implementation {self.implementation!r} "
                f"that can be imported here; it has {', '.join(implementations)}"
            )
        implementation = implementations[self.implementation]
        if config is not None:
            implementation = implementation.replace(
                config=type(implementation).config_cls(**config), vjp=None
            )

        def general(
            operation: str, left: jax.Array, right: jax.Array, sizes: jax.Array
        ) -> jax.Array:
            # The gradients are the calls that tokamax.ragged_dot's own vjp makes.
            contracted = CONTRACTED[operation]
            return tokamax.ragged_dot_general(
                left,
                right,
                sizes,
                jax.lax.RaggedDotDimensionNumbers(
                    dot_dimension_numbers=(([contracted[0]], [contracted[1]]), ([], [])),
                    lhs_ragged_dimensions=[0],
                    rhs_group_dimensions=[] if operation == "weight_gradient" else [0],
                ),
                preferred_element_type=jnp.bfloat16,
                implementation=(implementation,),
            )

        return general

    def layer_matmuls(self) -> dict[str, Callable[..., jax.Array]]:
        """Returns a differentiable matmul for tokamax's own choice and for each configuration."""
        return {
            str(config): differentiable(self._general(config)) for config in (None, *self.configs)
        }


def differentiable(general: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Returns a grouped matmul with the derivative that `general` computes."""

    @jax.custom_vjp
    def matmul(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
        return general("forward", lhs, rhs, sizes)

    def forward(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> Any:
        return matmul(lhs, rhs, sizes), (lhs, rhs, sizes)

    def backward(residuals: Any, out_bar: jax.Array) -> Any:
        lhs, rhs, sizes = residuals
        lhs_bar = general("input_gradient", out_bar, rhs, sizes)
        return lhs_bar, general("weight_gradient", lhs, out_bar, sizes), None

    matmul.defvjp(forward, backward)
    return matmul


class Torch:
    """torch._grouped_mm on the same arrays, which it reads in place."""

    name = "torch"
    operations: tuple[str, ...] = OPERATIONS

    def start(self, case: Case, problem: list[Operands]) -> Started:
        """Lends the operands to torch."""
        torch = import_torch()

        def call(x: Any) -> Any:
            left, right, ends = x
            return torch._grouped_mm(left, right, offs=ends)

        def lend(x: Operands) -> Any:
            lhs, rhs, out_gradient = map(torch.from_dlpack, (x.lhs, x.rhs, x.out_gradient))
            ends = torch.from_dlpack(jax.block_until_ready(jnp.cumsum(x.sizes, dtype=jnp.int32)))
            left, right = {
                "forward": (lhs, rhs),
                "input_gradient": (out_gradient, rhs.transpose(-2, -1)),
                "weight_gradient": (lhs.transpose(-2, -1), out_gradient),
            }[case.operation]
            return left, right, ends

        return started_in_torch(torch, call, [lend(x) for x in problem])


def import_torch() -> Any:
    """Returns torch; raises unless it runs where JAX does."""
    torch = importlib.import_module("torch")
    if jax.default_backend() == "gpu" and not torch.cuda.is_available():
        raise NotImplementedError(f"torch {torch.__version__} sees no GPU; it needs its CUDA build")
    return torch


def started_in_torch(torch: Any, call: Callable[[Any], Any], arguments: list[Any]) -> Started:
    """Returns a call of torch that is ready to be timed."""

    def completion(result: Any) -> Any:
        if not result.is_cuda:
            return lambda: None
        event = torch.cuda.Event()
        event.record()
        return event.synchronize

    def to_jax(result: Any) -> jax.Array:
        if result.is_cuda:
            torch.cuda.synchronize()
        return jnp.from_dlpack(result.contiguous())

    return Started(call, arguments, completion, to_jax)


_MOSAIC = {"block_m": 128, "block_n": 64, "block_k": 128, "split_k": 1}
PROVIDERS: tuple[Provider, ...] = (
    Dense("dense", dense),
    Computed("jax_ep", ours),
    Computed("lax.ragged_dot", ragged_dot),
    Torch(),
    Tokamax(
        "triton",
        "triton",
        ({"block_m": 128, "block_n": 256, "block_k": 64, "num_warps": 8, "num_stages": 3},),
    ),
    Tokamax(
        "mosaic",
        "mosaic_gpu",
        (
            _MOSAIC
            | {"num_stages": 4, "persistent": True, "grid_minor_dim": 1, "grid_tile_width": 8},
            _MOSAIC
            | {"num_stages": 2, "persistent": False, "grid_minor_dim": 0, "grid_tile_width": 1},
        ),
    ),
)
