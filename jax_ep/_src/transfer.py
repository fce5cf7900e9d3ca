"""The three transfer primitives. They are each other's derivatives, so they stand together.

* dispatch: x, topk_ids, [topk_weights] -> rows, [row_weights], plan
* redispatch: x, plan, [topk_weights] -> rows, [row_weights]
* combine: y, plan, [row_weights], [row_scalars] -> out, [assignment_scalars]
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep._src import compat, primitive
from jax_ep._src.compat import Aval
from jax_ep._src.mesh import ExpertAxis
from jax_ep._src.plan import PlanArrays, plan_shapes
from jax_ep._src.reference import transfer as reference

MAX_RANKS = 64
"""Ranks that the kernels take."""

MAX_TOP_K = 64
"""Choices of a token that the kernels take."""

MAX_EXPERTS = 2048
"""Experts of all ranks that the kernels take: they count the choices of each in shared memory."""

ROW_UNIT = 16
"""The kernels move rows in pieces of so many bytes."""


@dataclasses.dataclass(frozen=True)
class TransferParams:
    """The static parameters of a transfer, hashed by value."""

    axis: ExpertAxis
    num_experts: int
    num_rows: int
    row_align: int
    zero_tail: bool
    num_sms: int
    implementation: str | None


def bind_dispatch(
    x: jax.Array, topk_ids: jax.Array, topk_weights: jax.Array | None, params: TransferParams
) -> tuple[jax.Array, jax.Array | None, PlanArrays]:
    """Rows, row weights and the plan."""
    weights = () if topk_weights is None else (topk_weights,)
    results = dispatch_p.bind(x, topk_ids, *weights, params=params)
    rows, *row_weights = results[: 1 + len(weights)]
    return rows, row_weights[0] if row_weights else None, PlanArrays(*results[1 + len(weights) :])


def bind_redispatch(
    x: jax.Array, plan: PlanArrays, topk_weights: jax.Array | None, params: TransferParams
) -> tuple[jax.Array, jax.Array | None]:
    """Rows and row weights."""
    weights = () if topk_weights is None else (topk_weights,)
    rows, *row_weights = redispatch_p.bind(x, *plan, *weights, params=params)
    return rows, row_weights[0] if row_weights else None


def bind_combine(
    y: jax.Array,
    plan: PlanArrays,
    row_weights: jax.Array | None,
    row_scalars: jax.Array | None,
    params: TransferParams,
) -> tuple[jax.Array, jax.Array | None]:
    """Sums, and each choice's row scalar [T, K], with exact zeros where it has no row."""
    optional = [array for array in (row_weights, row_scalars) if array is not None]
    out, *assignment_scalars = combine_p.bind(
        y,
        *plan,
        *optional,
        has_weights=row_weights is not None,
        has_scalars=row_scalars is not None,
        params=params,
    )
    return out, assignment_scalars[0] if assignment_scalars else None


# ---- abstract evaluation


def _dispatch_avals(
    x: Aval, topk_ids: Aval, *topk_weights: Aval, params: TransferParams
) -> list[Aval]:
    num_tokens, top_k = topk_ids.shape
    num_local = params.num_experts // params.axis.size
    shapes = plan_shapes(num_tokens, top_k, num_local, params.num_rows)
    rows = _row_avals(x, len(topk_weights), params)
    return [*rows, *(compat.aval_like(x, shape, dtype) for shape, dtype in shapes)]


def _redispatch_avals(x: Aval, *operands: Aval, params: TransferParams) -> list[Aval]:
    return _row_avals(x, len(operands) - len(PlanArrays._fields), params)


def _row_avals(x: Aval, num_weights: int, params: TransferParams) -> list[Aval]:
    rows = compat.aval_like(x, (params.num_rows, x.shape[1]), x.dtype)
    row_weights = compat.aval_like(x, (params.num_rows,), jnp.float32)
    return [rows] + [row_weights] * num_weights


def _combine_avals(
    y: Aval, *operands: Aval, params: TransferParams, has_weights: bool, has_scalars: bool
) -> list[Aval]:
    num_tokens, top_k = PlanArrays(*operands[: len(PlanArrays._fields)]).kept.shape
    out = compat.aval_like(y, (num_tokens, y.shape[1]), y.dtype)
    assignment_scalars = compat.aval_like(y, (num_tokens, top_k), jnp.float32)
    return [out] + [assignment_scalars] * has_scalars


# ---- lowering


def _attributes(avals: list[Aval], params: TransferParams, **flags: bool) -> dict[str, Any]:
    return {
        "replica_groups": params.axis.replica_groups().reshape(-1),
        "group_size": np.int64(params.axis.size),
        "num_experts": np.int64(params.num_experts),
        "row_align": np.int64(params.row_align),
        "zero_tail": np.bool_(params.zero_tail),
        "num_sms": np.int64(params.num_sms),
        **{name: np.bool_(flag) for name, flag in flags.items()},
    }


def _dispatch_attributes(avals: list[Aval], params: TransferParams) -> dict[str, Any]:
    return _attributes(avals, params, has_weights=len(avals) == 3)


def _redispatch_attributes(avals: list[Aval], params: TransferParams) -> dict[str, Any]:
    return _attributes(avals, params, has_weights=len(avals) == 2 + len(PlanArrays._fields))


def _unsupported(choices: tuple[int, int], rows: Aval, params: TransferParams) -> str | None:
    """`choices` is [T, K] and `rows` has a row's size and dtype."""
    num_ranks, (num_tokens, top_k) = params.axis.size, choices
    if num_ranks > MAX_RANKS:
        return f"the expert axis has {num_ranks} ranks; the kernels take up to {MAX_RANKS}"
    row_bytes = rows.shape[1] * rows.dtype.itemsize
    if row_bytes % ROW_UNIT:
        return f"rows are {row_bytes} bytes; the kernels take multiples of {ROW_UNIT}"
    if top_k > MAX_TOP_K:
        return f"a token has {top_k} choices; the kernels take up to {MAX_TOP_K}"
    if params.num_experts > MAX_EXPERTS:
        return f"there are {params.num_experts} experts; the kernels take up to {MAX_EXPERTS}"
    return primitive.too_many(
        num_rows=params.num_rows,
        num_choices=num_ranks * num_tokens * top_k,
    )


def _dispatch_unsupported(avals: list[Aval], params: TransferParams) -> str | None:
    return _unsupported(avals[1].shape, avals[0], params)


def _by_plan_unsupported(avals: list[Aval], params: TransferParams, **_: bool) -> str | None:
    plan = PlanArrays(*avals[1 : 1 + len(PlanArrays._fields)])
    return _unsupported(plan.kept.shape, avals[0], params)


dispatch_p = primitive.define_primitive(
    "dispatch",
    abstract_eval=_dispatch_avals,
    reference=reference.dispatch,
    attributes=_dispatch_attributes,
    unsupported=_dispatch_unsupported,
)

redispatch_p = primitive.define_primitive(
    "redispatch",
    abstract_eval=_redispatch_avals,
    reference=reference.redispatch,
    attributes=_redispatch_attributes,
    unsupported=_by_plan_unsupported,
)

combine_p = primitive.define_primitive(
    "combine",
    abstract_eval=_combine_avals,
    reference=reference.combine,
    attributes=_attributes,
    unsupported=_by_plan_unsupported,
)
