"""Whole layers: jax_ep's, and those that people write in plain JAX.

Each is a function of one rank's x [T, H], ids [T, K], weights [T, K], w_up [L, H, 2F] and w_down
[L, F, H]; the router is not in it.
"""

from __future__ import annotations

from collections.abc import Callable

import jax

from jax_ep.bench.common.benchmark import Case, Provider, Started
from jax_ep.bench.common.report import OURS
from jax_ep.bench.layer import baselines
from jax_ep.bench.layer import quantized as layer_quantized
from jax_ep.bench.layer.ours import Ours
from jax_ep.bench.layer.parts import DENSE, PARTS
from jax_ep.bench.layer.passes import Layer, start_layer
from jax_ep.bench.layer.problem import Problem, Shape
from jax_ep.bench.layer.torch import Torch
from jax_ep.bench.layer.transformer_engine import TransformerEngine
from jax_ep.bench.matmul import providers as matmul_providers

OPERATIONS: tuple[str, ...] = ("forward", "both")
KEEPING_ROWS = f"{OURS} remat=None"
IN_FLIGHT = f"{OURS} overlap=True"


class Baseline:
    """A layer in plain JAX.

    Attributes:
      make: makes it for a problem and a grouped matmul.
      matmuls: the grouped matmuls to try; the one that is fastest with the layer is measured.
      for_several: whether it is for several ranks, or for one.
    """

    operations: tuple[str, ...] = OPERATIONS

    def __init__(
        self,
        name: str,
        make: Callable[[Problem, baselines.GroupedMatmul], Layer],
        matmuls: Callable[[], dict[str, baselines.GroupedMatmul]],
        *,
        for_several: bool,
    ) -> None:
        self.name = name
        self.make = make
        self.matmuls = matmuls
        self.for_several = for_several

    def applies(self, shape: Shape, weights: str, num_ranks: int) -> bool:
        """For one rank or for several."""
        return (num_ranks > 1) == self.for_several

    def start(self, case: Case, problem: Problem) -> list[Started]:
        """Compiles it with every matmul."""
        found: list[Started] = []
        errors: list[Exception] = []
        for label, matmul in self.matmuls().items():
            try:
                layer = self.make(problem, matmul)
                started = start_layer(layer, case, problem, None, check_vma=False)
            except Exception as error:  # noqa: BLE001  a configuration may not fit the shape
                errors.append(error.with_traceback(None))  # which would keep the operands alive
            else:
                started.facts["matmul"] = label
                found.append(started)
        if not found:
            raise errors[0]
        return found


def _plain() -> dict[str, baselines.GroupedMatmul]:
    return {"lax.ragged_dot": jax.lax.ragged_dot}


def _baselines() -> tuple[Provider, ...]:
    kinds = {"lax.ragged_dot": _plain}
    for tokamax in matmul_providers.PROVIDERS:
        if isinstance(tokamax, matmul_providers.Tokamax):
            kinds[tokamax.name] = tokamax.layer_matmuls
    found: list[Provider] = []
    for kind, matmuls in kinds.items():
        for name, make, several in (
            ("sort, {}, gather", baselines.sort_gather, False),
            ("sort, {}, scatter", baselines.sort_scatter, False),
            ("all_gather, {}, psum_scatter", baselines.gather_scatter, True),
            ("ragged_all_to_all, {}", baselines.ragged_all_to_all, True),
        ):
            found.append(Baseline(name.format(kind), make, matmuls, for_several=several))
    found.append(Baseline("einsum, capacity 1.25", baselines.einsum, _plain, for_several=False))
    return tuple(found)


PROVIDERS: tuple[Provider, ...] = (
    Ours(OURS, OPERATIONS),
    Ours(KEEPING_ROWS, ("both",), remat=None),
    Ours(IN_FLIGHT, ("both",), overlap=True),
    *layer_quantized.PROVIDERS,
    *PARTS,
    *DENSE,
    *_baselines(),
    Torch("torch", compiled=False),
    Torch("torch.compile", compiled=True),
    TransformerEngine(),
)
