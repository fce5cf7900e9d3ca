"""Contenders from outside JAX: tokamax and torch. Imported when they are started, not before.

Tokamax 0.0.14 is the newest with both kinds of kernels beside torch 2.11: later ones write their
Triton kernels for jax-triton, whose current version needs a newer triton than that torch brings.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep.bench import timing
from jax_ep.bench.cases import Operands
from jax_ep.bench.measure import Started, start_jax

TUNING_ITERATIONS = 5

# Where tokamax has no tuned configuration (an H200) it takes a fixed one, and its own search
# compiles hundreds a shape. These are tried beside its choice: the most frequent winners in its
# data/autotuning/nvidia_h100_80gb_hbm3.
_MOSAIC = {"block_m": 128, "block_n": 64, "block_k": 128, "split_k": 1}
_MOSAIC_CONFIGS: tuple[dict[str, Any], ...] = (
    _MOSAIC | {"num_stages": 4, "persistent": True, "grid_minor_dim": 1, "grid_tile_width": 8},
    _MOSAIC | {"num_stages": 2, "persistent": False, "grid_minor_dim": 0, "grid_tile_width": 1},
)
_TRITON_CONFIGS: tuple[dict[str, Any], ...] = (
    {"block_m": 128, "block_n": 256, "block_k": 64, "num_warps": 8, "num_stages": 3},
)


class TokamaxMosaic:
    """tokamax.ragged_dot by its Mosaic GPU kernels, the fastest of a few configurations."""

    name = "tokamax mosaic"
    implementation = "mosaic_gpu"
    configs = _MOSAIC_CONFIGS

    def __init__(self) -> None:
        self._fastest: dict[Any, Any] = {}

    def start(self, operation: str, operands: list[Operands]) -> Started:
        """Compiles the configuration that was fastest for the first groups of such operands."""
        key = operation, operands[0].lhs.shape, operands[0].rhs.shape
        if key in self._fastest:
            return self._start(operation, operands, self._fastest[key])
        started = self._tune(operation, operands)
        self._fastest[key] = started.facts["config"]
        return started

    def _tune(self, operation: str, operands: list[Operands]) -> Started:
        """The fastest configuration."""
        tried: dict[float, Started] = {}
        errors = []
        for config in (None, *self.configs):
            try:
                started = self._start(operation, operands, config)
                times = timing.device_times(started.call, started.arguments, TUNING_ITERATIONS)
            except Exception as error:  # noqa: BLE001  a configuration may not fit the shape
                errors.append(error.with_traceback(None))  # which would keep the operands alive
                continue
            tried[timing.Times.of(times).median] = started
        if not tried:
            raise errors[0]
        return tried[min(tried)]

    def _start(
        self, operation: str, operands: list[Operands], config: dict[str, Any] | None
    ) -> Started:
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

        def compute(x: Operands) -> jax.Array:
            # The gradients are the calls that tokamax.ragged_dot's own vjp makes.
            left, right, contracted = {
                "forward": (x.lhs, x.rhs, (1, 1)),
                "input_gradient": (x.out_gradient, x.rhs, (1, 2)),
                "weight_gradient": (x.lhs, x.out_gradient, (0, 0)),
            }[operation]
            return tokamax.ragged_dot_general(
                left,
                right,
                x.sizes,
                jax.lax.RaggedDotDimensionNumbers(
                    dot_dimension_numbers=(([contracted[0]], [contracted[1]]), ([], [])),
                    lhs_ragged_dimensions=[0],
                    rhs_group_dimensions=[] if operation == "weight_gradient" else [0],
                ),
                preferred_element_type=jnp.bfloat16,
                implementation=(implementation,),
            )

        started = start_jax(compute, operands)
        started.facts["config"] = config  # None is tokamax's own choice
        return started


class TokamaxTriton(TokamaxMosaic):
    """The same by its Triton kernels."""

    name = "tokamax triton"
    implementation = "triton"
    configs = _TRITON_CONFIGS


class Torch:
    """torch._grouped_mm on the same arrays, which it reads in place."""

    name = "torch"

    def start(self, operation: str, operands: list[Operands]) -> Started:
        """Lends the operands to torch."""
        torch = importlib.import_module("torch")
        if jax.default_backend() == "gpu" and not torch.cuda.is_available():
            raise NotImplementedError(
                f"torch {torch.__version__} sees no GPU; it needs its CUDA build"
            )

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
            }[operation]
            return left, right, ends

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

        return Started(call, [lend(x) for x in operands], completion, to_jax)
