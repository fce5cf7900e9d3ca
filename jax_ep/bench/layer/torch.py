"""A layer in torch around torch._grouped_mm, on the arrays of JAX, which it reads in place."""

from __future__ import annotations

import importlib
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep.bench.common.benchmark import Case, Started
from jax_ep.bench.layer.problem import Problem, Shape


class Torch:
    """Sorts rows by expert, two grouped matmuls, and gathers; on one GPU."""

    operations: tuple[str, ...] = ("forward", "both")

    def __init__(self, name: str, *, compiled: bool) -> None:
        self.name = name
        self.compiled = compiled

    def applies(self, shape: Shape, weights: str, num_ranks: int) -> bool:
        """One process of torch drives one GPU."""
        return num_ranks == 1

    def start(self, case: Case, problem: Problem) -> Started:
        """Lends the operands to torch."""
        torch = importlib.import_module("torch")
        if jax.default_backend() == "gpu" and not torch.cuda.is_available():
            raise NotImplementedError(
                f"torch {torch.__version__} sees no GPU; it needs its CUDA build"
            )
        layer = make_layer(torch, self.compiled)

        def forward(given: Any) -> Any:
            with torch.no_grad():
                return layer(given[0], *given[2:])

        def both(given: Any) -> Any:
            x, out_bar, ids, *floats = given
            floats = [a.detach().requires_grad_() for a in (x, *floats)]
            out = layer(floats[0], ids, *floats[1:])
            return (out.detach(), torch.autograd.grad(out, floats, out_bar))

        def completion(result: Any) -> Any:
            out = result[0] if isinstance(result, tuple) else result
            if not out.is_cuda:
                return lambda: None
            event = torch.cuda.Event()
            event.record()
            return event.synchronize

        def to_jax(result: Any) -> Any:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            return jax.tree.map(lambda a: jnp.from_dlpack(a.contiguous()), result)

        arguments = [[torch.from_dlpack(a) for a in operands] for operands in problem.sets]
        call = forward if case.operation == "forward" else both
        for _ in range(2 if self.compiled else 0):  # compiles
            call(arguments[0])
        return Started(call, arguments, completion, to_jax)


def make_layer(torch: Any, compiled: bool) -> Any:
    """Returns the layer; torch.compile fuses what is between its matmuls."""

    def activate(pre_activation: Any) -> Any:
        gate, up = pre_activation.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    def gather(y: Any, order: Any, weights: Any) -> Any:
        inverse = torch.argsort(order)
        by_token = y[inverse].view(*weights.shape, -1)
        return (by_token * weights.unsqueeze(-1)).sum(1).to(y.dtype)

    if compiled:
        activate, gather = torch.compile(activate), torch.compile(gather)

    def layer(x: Any, ids: Any, weights: Any, w_up: Any, w_down: Any) -> Any:
        sorted_ids, order = torch.sort(ids.flatten(), stable=True)
        experts = torch.arange(w_up.shape[0], device=ids.device, dtype=ids.dtype)
        ends = torch.searchsorted(sorted_ids, experts, right=True).to(torch.int32)
        rows = x[order // ids.shape[1]]
        hidden = activate(torch._grouped_mm(rows, w_up.to(x.dtype), offs=ends))
        y = torch._grouped_mm(hidden, w_down.to(x.dtype), offs=ends)
        return gather(y, order, weights)

    return layer
