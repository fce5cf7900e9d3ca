"""memory: the bytes that a layer takes, from its shapes and options, before it runs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jax_ep._src.core import checks, runtime
from jax_ep._src.core.errors import ArgumentError, DtypeError
from jax_ep._src.matmul.activations import ClampedSwiGlu, NamedActivation
from jax_ep._src.mlp.expert_forms import check_activation
from jax_ep._src.moe.params import COMBINE_LANE, DISPATCH_LANE, Remat
from jax_ep._src.transfer.domains import check_domain_size
from jax_ep._src.transfer.plan import num_rows, plan_shapes


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes that one rank takes, by array. `sum(memory.residuals.values())` is a total.

    Attributes:
      num_rows: M, the rows that the rank can receive in one chunk.
      workspace: device memory outside JAX's pool, by buffer. All layers of one rank group share it,
        and platforms other than CUDA need none.
      results: what the operations of one chunk return in a forward pass, without those of a shared
        expert. Because XLA frees each result after its last use and chunks run one after another,
        their sum bounds what they take at any time.
      residuals: what one layer keeps for its backward pass, for all chunks together.
    """

    num_rows: int
    workspace: Mapping[str, int]
    results: Mapping[str, int]
    residuals: Mapping[str, int]


def memory(
    num_tokens: int,
    hidden_size: int,
    intermediate_size: int,
    num_experts: int,
    top_k: int,
    num_ranks: int,
    *,
    dtype: Any = jnp.bfloat16,
    activation: str | ClampedSwiGlu = "swiglu",
    shared_intermediate_size: int = 0,
    capacity_factor: float | None = None,
    recv_capacity: int | None = None,
    num_chunks: int = 1,
    remat: Remat = "dispatch",
    nvlink_domain_size: int | None = None,
    overlap: bool | None = None,
) -> Memory:
    """Computes, without allocating, what `moe_mlp` takes on one rank beside its arguments.

    The layer is taken to have routing weights, on the experts' output, and an activation with a
    name. With a ``remat``, x is among the residuals, although a model that keeps x anyway keeps it
    only once.

    DeepSeek-V3 on 64 ranks, with 4096 tokens each::

        m = jax_ep.memory(4096, 7168, 2048, 256, 8, 64, capacity_factor=1.25)
        gib = sum(m.residuals.values()) / 2**30

    Args:
      num_tokens: T, the tokens per rank.
      hidden_size: H, the size of the experts' rows.
      intermediate_size: F.
      num_experts: E, the experts of all ranks, padded to a multiple of R as in the modules.
      top_k: K, experts per token.
      num_ranks: R, the ranks of the expert axis.
      dtype: the dtype of the tokens.
      activation: as in `moe_mlp`, but no function.
      shared_intermediate_size: the F of a shared expert without a gate, 0 without one.
      capacity_factor: as in `moe_mlp`.
      recv_capacity: as in `moe_mlp`.
      num_chunks: as in `moe_mlp`.
      remat: as in `moe_mlp`.
      nvlink_domain_size: as in `moe_mlp`. Over several hosts without a network for the kernels,
        XLA's collectives take memory instead of the workspace.
      overlap: as in `moe_mlp`. Each of the two lanes in flight has a workspace of its own.

    Returns:
      `Memory`.

    Raises:
      ArgumentError (a ValueError): sizes or options that do not fit each other.
      DtypeError (a TypeError): a size that is not an int, a dtype that is not a float, or an
        activation that is not a name.
    """
    operation = "memory"
    checks.integer(operation, "num_tokens", num_tokens, least=0)
    for name, size in (
        ("hidden_size", hidden_size),
        ("intermediate_size", intermediate_size),
        ("num_experts", num_experts),
        ("top_k", top_k),
        ("num_ranks", num_ranks),
    ):
        checks.integer(operation, name, size)
    if not isinstance(activation, NamedActivation):
        raise DtypeError(
            f"jax_ep.{operation}: activation is a {type(activation).__name__}; expected the name "
            "of one. For a function give that of one with as many arguments: 'swiglu' or 'relu'."
        )
    checks.capacity(operation, recv_capacity, capacity_factor)
    checks.num_chunks(operation, num_chunks, num_tokens)
    checks.remat(operation, remat)
    checks.integer(operation, "shared_intermediate_size", shared_intermediate_size, least=0)
    itemsize = checks.float_dtype(operation, "dtype", dtype, "Give the tokens' dtype.").itemsize
    tokens = num_tokens // num_chunks
    num_padded_experts = -(-num_experts // num_ranks) * num_ranks
    if capacity_factor is not None and num_padded_experts > num_experts:
        capacity_factor *= num_padded_experts / num_experts
    domain_size = check_domain_size(operation, nvlink_domain_size, num_ranks)
    try:
        workspace = runtime.workspace_buffers(
            tokens, hidden_size, top_k, num_padded_experts, num_ranks, itemsize, domain_size
        )
    except ValueError as error:
        raise ArgumentError(f"jax_ep.{operation}: {error}") from error
    if overlap:
        num_lanes = len((0, DISPATCH_LANE, COMBINE_LANE))
        workspace = {name: num_lanes * size for name, size in workspace.items()}
    num_local = num_padded_experts // num_ranks
    if recv_capacity is None:
        rows = num_rows(tokens, top_k, num_ranks, num_local, 1, capacity_factor)
    else:
        rows = -(-recv_capacity // num_chunks)
    num_parts = 2 if check_activation(operation, activation) else 1
    shapes = plan_shapes(tokens, top_k, num_local, rows, num_ranks, domain_size)
    arrays = {
        "rows": rows * hidden_size * itemsize,
        "row_weights": rows * 4,
        "plan": sum(math.prod(shape) * jnp.dtype(of).itemsize for shape, of in shapes),
        "pre_activation": rows * num_parts * intermediate_size * itemsize,
        "activations": rows * intermediate_size * itemsize,
        "expert_outputs": rows * hidden_size * itemsize,
        "x": tokens * hidden_size * itemsize,
        "topk_weights": tokens * top_k * 4,
        "out": tokens * hidden_size * itemsize,
    }
    kept = {
        None: ("rows", "row_weights", "plan", "pre_activation"),
        "dispatch": ("x", "topk_weights", "plan", "pre_activation"),
        "experts": ("x", "topk_weights", "plan"),
    }[remat]
    if overlap and remat == "dispatch":  # the gradients of rows need them before the rows are there
        kept += ("row_weights",)
    residuals = {name: arrays[name] * num_chunks for name in kept}
    if shared_intermediate_size:
        # Chunks that keep their tokens keep slices of x.
        copies = 2 if num_chunks > 1 and "x" in residuals else 1
        residuals["x"] = copies * num_tokens * hidden_size * itemsize
        residuals["shared_group_size"] = 4
        if remat != "experts":
            columns = num_parts * shared_intermediate_size
            residuals["shared_pre_activation"] = num_tokens * columns * itemsize
    made = ["rows", "row_weights", "plan", "activations", "expert_outputs", "out"]
    if "pre_activation" in kept:
        made.append("pre_activation")
    return Memory(
        num_rows=rows,
        workspace=workspace,
        results={name: arrays[name] for name in made},
        residuals=residuals,
    )
