"""The routing of one dispatch, as a pytree that dispatch makes and combine and gradients use."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_ep._src.core import checks
from jax_ep._src.core.errors import ArgumentError, DtypeError
from jax_ep._src.core.expert_axis import AxisName, ExpertAxis
from jax_ep._src.transfer.domains import Forwarding, forwarding_shapes
from jax_ep._src.transfer.params import TransferParams

REMAT_NAMES = ("jax_ep.plan", "jax_ep.rows", "jax_ep.pre_activation", "jax_ep.combined")
"""The names of what a layer may keep, for ``jax.checkpoint`` policies.

With ``jax.checkpoint_policies.save_only_these_names(*REMAT_NAMES)`` the backward pass repeats
neither dispatch, combine nor the first matmul. Each ``remat`` of `moe_mlp` then keeps what it keeps
without a checkpoint. Rows and plan come from one call, so keeping only one of the two repeats it,
unless the other is not needed: ``remat="experts"`` needs the plan alone.

``dots_saveable`` saves none of these, because custom calls are no dots. Combine it with the names
by ``jax.checkpoint_policies.save_from_both_policies``.
"""

MIN_CAPACITY = 1024
"""Rows that a capacity factor never cuts into: below that there is nothing worth saving."""

_STATIC = {"static": True}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """The routing of one dispatch: the source of every row, and the rank of every assignment.

    R ranks, E experts of which L = E/R are local, T tokens per rank, K experts per token, M rows.
    Every array has at least one dimension, so that one ``P(axis_name)`` takes a whole plan out of
    `shard_map` (and back in): the arrays of all ranks are then concatenated.

    Attributes:
      group_sizes: int32[L], rows of each local expert, alignment padding included.
      real_group_sizes: int32[L], rows of each local expert, without padding.
      row_offsets: int32[L + 1], exclusive prefix sum of `group_sizes`; the tail begins at the last.
      row_source: int32[M, 3], (rank, token, k) of each row; -1 for padding and tail.
      partial_sum_index: int32[M], the index of this rank's partial sum among those of the row's
        token, which are in rank order. -1 for padding and tail.
      kept: bool[T, K], this rank's assignments that were routed and not dropped.
      destination: int32[T, K], the rank that got each assignment; -1 if it was not kept.
      num_received: int32[1], rows that all ranks wanted to send here, before any drop, without
        padding.
      num_dropped: int32[1], how many of those did not fit into M.
      num_bad_ids: int32[1], ids of this rank outside [-1, E).
      status: int32[1], 0 if the exchange succeeded. Any operation given a plan with another status
        returns NaN; `jax_ep.check()` raises the reason.
      axis_name: the expert axis (static).
      num_ranks: R (static).
      num_experts: E (static).
      row_align: each group's size is a multiple of this (static).
      zero_tail: whether cotangents made by this plan have a zero tail, too (static).
      nvlink_domain_size: ranks per NVLink domain, or None for one level (static).
      forwarding: private; what transfers of two levels need beside, or None.
    """

    group_sizes: jax.Array
    real_group_sizes: jax.Array
    row_offsets: jax.Array
    row_source: jax.Array
    partial_sum_index: jax.Array
    kept: jax.Array
    destination: jax.Array
    num_received: jax.Array
    num_dropped: jax.Array
    num_bad_ids: jax.Array
    status: jax.Array
    axis_name: AxisName = dataclasses.field(metadata=_STATIC)
    num_ranks: int = dataclasses.field(metadata=_STATIC)
    num_experts: int = dataclasses.field(metadata=_STATIC)
    row_align: int = dataclasses.field(metadata=_STATIC)
    zero_tail: bool = dataclasses.field(metadata=_STATIC)
    nvlink_domain_size: int | None = dataclasses.field(default=None, metadata=_STATIC)
    forwarding: Any = None

    @property
    def arrays(self) -> PlanArrays:
        """The array fields in order, which are the plan as operands of a primitive."""
        return PlanArrays(*(getattr(self, name) for name in PlanArrays._fields))


class PlanArrays(NamedTuple):
    """The array fields of a `Plan`, in the order in which FFI handlers take and return them.

    As operands they are the leaves of this tree, which are fewer without `forwarding`.
    """

    group_sizes: Any
    real_group_sizes: Any
    row_offsets: Any
    row_source: Any
    partial_sum_index: Any
    kept: Any
    destination: Any
    num_received: Any
    num_dropped: Any
    num_bad_ids: Any
    status: Any
    forwarding: Forwarding | None = None

    @classmethod
    def split(
        cls, operands: Sequence[Any], params: TransferParams
    ) -> tuple[PlanArrays, Sequence[Any]]:
        """Returns the plan that operands begin with, and the others."""
        plan, others = cls(*operands[:NUM_ARRAYS]), operands[NUM_ARRAYS:]
        if params.domain_size is None:
            return plan, others
        count = len(Forwarding._fields)
        return plan._replace(forwarding=Forwarding(*others[:count])), others[count:]


NUM_ARRAYS = len(PlanArrays._fields) - 1
"""The arrays of a plan of one level."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Dispatched:
    """The results of `dispatch` and `redispatch`: a pytree. Later versions may add members.

    Attributes:
      rows: [M, H], the received tokens in the order (local expert, source rank, token, k);
        `quant.Quantized` if they were sent so.
      row_weights: float32[M], each row's routing weight, or None if no weights were given.
      group_sizes: int32[L], rows of each local expert; the same array as ``plan.group_sizes``.
      plan: the routing, for `combine` and `redispatch`.
    """

    rows: Any  # jax.Array, or Quantized
    row_weights: jax.Array | None
    group_sizes: jax.Array
    plan: Plan


def plan_shapes(
    num_tokens: int,
    top_k: int,
    num_local_experts: int,
    num_rows: int,
    num_ranks: int = 1,
    domain_size: int | None = None,
) -> tuple[tuple[tuple[int, ...], Any], ...]:
    """(shape, dtype) of each array of a plan, in the order of `PlanArrays`."""
    of_one_level: Any = PlanArrays(
        group_sizes=((num_local_experts,), jnp.int32),
        real_group_sizes=((num_local_experts,), jnp.int32),
        row_offsets=((num_local_experts + 1,), jnp.int32),
        row_source=((num_rows, 3), jnp.int32),
        partial_sum_index=((num_rows,), jnp.int32),
        kept=((num_tokens, top_k), jnp.bool_),
        destination=((num_tokens, top_k), jnp.int32),
        num_received=((1,), jnp.int32),
        num_dropped=((1,), jnp.int32),
        num_bad_ids=((1,), jnp.int32),
        status=((1,), jnp.int32),
    )
    of_two = forwarding_shapes(num_tokens, num_rows, num_ranks, domain_size)
    return *of_one_level[:NUM_ARRAYS], *of_two


def num_rows(
    num_tokens: int,
    top_k: int,
    num_ranks: int,
    num_local_experts: int,
    row_align: int,
    capacity_factor: float | None,
) -> int:
    """M without a `recv_capacity`: the dropless rows, or those that a capacity factor leaves."""
    dropless = num_ranks * num_tokens * min(top_k, num_local_experts)
    rows = dropless
    if capacity_factor is not None:
        even_share = math.ceil(capacity_factor * num_tokens * top_k)
        rows = min(max(even_share, MIN_CAPACITY), dropless)
    rows += num_local_experts * (row_align - 1)
    return -(-rows // row_align) * row_align


# ---- checks


def check_num_rows(
    operation: str,
    ids_shape: tuple[int, ...],
    axis: ExpertAxis,
    num_experts: int,
    *,
    row_align: int,
    recv_capacity: int | None,
    capacity_factor: float | None,
) -> int:
    """M, the rows that a rank can receive."""
    row_align = checks.integer(operation, "row_align", row_align)
    checks.capacity(operation, recv_capacity, capacity_factor)
    if recv_capacity is not None:
        return operator.index(recv_capacity)
    num_tokens, top_k = ids_shape
    return num_rows(
        num_tokens, top_k, axis.size, num_experts // axis.size, row_align, capacity_factor
    )


def params_along(
    operation: str, plan: Plan, num_sms: int | None, implementation: str | None
) -> TransferParams:
    """The parameters of a transfer along a plan, in the mesh in which the plan was made."""
    if not isinstance(plan, Plan):
        raise DtypeError(
            f"jax_ep.{operation}: plan is a {type(plan).__name__}; expected the jax_ep.Plan that "
            "dispatch returned. Give dispatched.plan."
        )
    has_axis = bool(plan.axis_name)
    axis = checks.expert_axis(operation, plan.axis_name) if has_axis else checks.own_axis()
    if axis.size != plan.num_ranks:
        raise ArgumentError(
            f"jax_ep.{operation}: axis {plan.axis_name!r} has {axis.size} ranks here; expected "
            f"{plan.num_ranks}, as in the plan. Use the plan in the mesh in which it was made."
        )
    return TransferParams(
        axis=axis,
        num_experts=plan.num_experts,
        num_rows=plan.row_source.shape[0],
        row_align=plan.row_align,
        zero_tail=plan.zero_tail,
        num_sms=checks.num_sms(operation, num_sms),
        implementation=checks.implementation(operation, implementation),
        domain_size=plan.nvlink_domain_size,
    )
