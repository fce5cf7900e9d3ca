"""The three transfer primitives. They are each other's derivatives, so they stand together.

* dispatch: x, [scales], topk_ids, [topk_weights] -> rows, [row_scales], [row_weights], plan
* redispatch: x, [scales], plan, [topk_weights] -> rows, [row_scales], [row_weights]
* combine: y, plan, [row_weights], [row_scalars] -> out, [assignment_scalars]

Quantized rows have scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive

from jax_ep._src.core import compat, network, primitive, runtime
from jax_ep._src.core.compat import Aval
from jax_ep._src.core.make_mesh import host_of
from jax_ep._src.core.runtime import LIMITS
from jax_ep._src.quant.formats import Fp8Block128, Fp8Row, row_scales
from jax_ep._src.quant.microscaling import MxFp4, MxFp8
from jax_ep._src.quant.nvfp4 import NvFp4
from jax_ep._src.quant.quantized import Quantized, row_bytes
from jax_ep._src.transfer import reference
from jax_ep._src.transfer.params import TransferParams
from jax_ep._src.transfer.plan import PlanArrays, plan_shapes
from jax_ep._src.transfer.tuning import Call, tuned_sms

Rows = jax.Array | Quantized
"""The rows that a transfer takes, and returns."""


def bind_dispatch[R: Rows](
    x: R, topk_ids: jax.Array, topk_weights: jax.Array | None, params: TransferParams
) -> tuple[R, jax.Array | None, PlanArrays]:
    """Returns rows, row weights and the plan."""
    arrays = _arrays(x)
    weights = () if topk_weights is None else (topk_weights,)
    results = dispatch_p.bind(*arrays, topk_ids, *weights, params=params)
    num_rows = len(arrays) + len(weights)
    plan, _ = PlanArrays.split(results[num_rows:], params)
    return *_rows(results[:num_rows], x), plan


def bind_redispatch[R: Rows](
    x: R, plan: PlanArrays, topk_weights: jax.Array | None, params: TransferParams
) -> tuple[R, jax.Array | None]:
    """Returns rows and row weights."""
    weights = () if topk_weights is None else (topk_weights,)
    return _rows(redispatch_p.bind(*_arrays(x), *jax.tree.leaves(plan), *weights, params=params), x)


def _arrays(x: Rows) -> tuple[jax.Array, ...]:
    return (x.values, x.scales) if isinstance(x, Quantized) else (x,)


def _rows[R: Rows](results: Sequence[jax.Array], like: R) -> tuple[R, jax.Array | None]:
    """Returns the rows, in the format of `like`, and row weights."""
    rows: Any
    if isinstance(like, Quantized):
        values, scales, *row_weights = results
        rows = Quantized(values, scales, like.format, like.tensor_scale)
    else:
        rows, *row_weights = results
    return rows, row_weights[0] if row_weights else None


def bind_combine(
    y: jax.Array,
    plan: PlanArrays,
    row_weights: jax.Array | None,
    row_scalars: jax.Array | None,
    params: TransferParams,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns sums, and each assignment's row scalar [T, K], exactly zero where it has no row."""
    optional = [array for array in (row_weights, row_scalars) if array is not None]
    out, *assignment_scalars = combine_p.bind(
        y,
        *jax.tree.leaves(plan),
        *optional,
        has_weights=row_weights is not None,
        has_scalars=row_scalars is not None,
        params=params,
    )
    return out, assignment_scalars[0] if assignment_scalars else None


# ---- abstract evaluation


def _dispatch_avals(*avals: Aval, params: TransferParams) -> list[Aval]:
    x, (topk_ids, *topk_weights) = reference.split_rows(avals)
    num_tokens, top_k = topk_ids.shape
    num_local = params.num_experts // params.axis.size
    shapes = plan_shapes(
        num_tokens, top_k, num_local, params.num_rows, params.axis.size, params.domain_size
    )
    rows = _row_avals(x, len(topk_weights), params)
    return [*rows, *(compat.aval_like(x[0], shape, dtype) for shape, dtype in shapes)]


def _redispatch_avals(*avals: Aval, params: TransferParams) -> list[Aval]:
    x, operands = reference.split_rows(avals)
    _, weights = PlanArrays.split(operands, params)
    return _row_avals(x, len(weights), params)


def _row_avals(x: Sequence[Aval], num_weights: int, params: TransferParams) -> list[Aval]:
    rows = [compat.aval_like(a, (params.num_rows, a.shape[1]), a.dtype) for a in x]
    row_weights = compat.aval_like(x[0], (params.num_rows,), jnp.float32)
    return rows + [row_weights] * num_weights


def _combine_avals(
    y: Aval, *operands: Aval, params: TransferParams, has_weights: bool, has_scalars: bool
) -> list[Aval]:
    num_tokens, top_k = PlanArrays.split(operands, params)[0].kept.shape
    out = compat.aval_like(y, (num_tokens, y.shape[1]), y.dtype)
    assignment_scalars = compat.aval_like(y, (num_tokens, top_k), jnp.float32)
    return [out] + [assignment_scalars] * has_scalars


# ---- lowering


def _attributes(call: Call, params: TransferParams, **flags: bool) -> dict[str, Any]:
    num_sms = params.num_sms
    if not num_sms and params.num_lanes == 1:
        num_sms = tuned_sms(call)
    return {
        "replica_groups": params.axis.replica_groups().reshape(-1),
        "group_size": np.int64(params.axis.size),
        "num_experts": np.int64(params.num_experts),
        "row_align": np.int64(params.row_align),
        "zero_tail": np.bool_(params.zero_tail),
        "num_sms": np.int64(num_sms),
        **_lane_attributes(params),
        **_domain_attributes(params),
        **{name: np.bool_(flag) for name, flag in flags.items()},
    }


def _lane_attributes(params: TransferParams) -> dict[str, Any]:
    # Absent in programs of one lane, which older versions of jax_ep can run, too.
    if (params.lane, params.num_lanes) == (0, 1):
        return {}
    return {"lane": np.int64(params.lane), "num_lanes": np.int64(params.num_lanes)}


def _domain_attributes(params: TransferParams) -> dict[str, Any]:
    return {} if params.domain_size is None else {"domain_size": np.int64(params.domain_size)}


def _dispatch_attributes(avals: list[Aval], params: TransferParams) -> dict[str, Any]:
    x, (topk_ids, *weights) = reference.split_rows(avals)
    call = _call("dispatch", x, topk_ids.shape, params)
    return _row_attributes(call, x, weights, params)


def _redispatch_attributes(avals: list[Aval], params: TransferParams) -> dict[str, Any]:
    x, operands = reference.split_rows(avals)
    plan, weights = PlanArrays.split(operands, params)
    call = _call("redispatch", x, plan.kept.shape, params)
    return _row_attributes(call, x, weights, params)


def _combine_attributes(avals: list[Aval], params: TransferParams, **flags: bool) -> dict[str, Any]:
    y, *operands = avals
    plan, _ = PlanArrays.split(operands, params)
    return _attributes(_call("combine", [y], plan.kept.shape, params), params, **flags)


def _row_attributes(
    call: Call, x: Sequence[Aval], weights: Sequence[Aval], params: TransferParams
) -> dict[str, Any]:
    flags = {"has_weights": len(weights) > 0}
    if len(x) > 1:  # absent for float rows, as for one lane
        flags["is_quantized"] = True
    return _attributes(call, params, **flags)


def _call(
    operation: str, rows: Sequence[Aval], ids_shape: tuple[int, int], params: TransferParams
) -> Call:
    num_tokens, top_k = ids_shape
    sizes = (params.axis.size, num_tokens, sum(map(row_bytes, rows)), top_k, params.num_experts)
    return Call(operation, *sizes, params.domain_size)


def _unsupported(
    ids_shape: tuple[int, int], x: Sequence[Aval], params: TransferParams
) -> str | None:
    num_ranks, (num_tokens, top_k) = params.axis.size, ids_shape
    rows, *scales = x
    payload_bytes, vector_bytes = row_bytes(rows), LIMITS["vector_bytes"]
    if scales and not _has_moved_scales(rows, scales[0]):
        return (
            f"rows of {rows.shape[1]} values in {rows.dtype} have {scales[0].shape[1]} scales in "
            f"{scales[0].dtype}; the kernels take those of jax_ep.quant's formats"
        )
    if num_ranks > LIMITS["num_ranks"]:
        return (
            f"the expert axis has {num_ranks} ranks; the kernels take up to {LIMITS['num_ranks']}"
        )
    if payload_bytes % vector_bytes:
        return f"rows are {payload_bytes} bytes; the kernels take multiples of {vector_bytes}"
    if top_k > LIMITS["top_k"]:
        return f"top_k is {top_k}; the kernels take up to {LIMITS['top_k']}"
    if params.num_experts > LIMITS["num_experts"]:
        most = LIMITS["num_experts"]
        return f"there are {params.num_experts} experts; the kernels take up to {most}"
    reason = primitive.too_many(
        num_rows=params.num_rows, num_assignments=num_ranks * num_tokens * top_k
    )
    if reason is not None or params.domain_size is None:
        return reason
    all_bytes = sum(map(row_bytes, x))
    sizes = (num_tokens, all_bytes, top_k, params.num_experts, num_ranks, params.domain_size)
    return runtime.domains_problem(*sizes)


def _has_moved_scales(values: Aval, scales: Aval) -> bool:
    """Whether the kernels move rows of these dtypes with as many scales."""
    per_row, per_block = row_scales(Fp8Row(), values.shape), row_scales(Fp8Block128(), values.shape)
    if scales.dtype == jnp.float32:
        is_moved = values.dtype in (jnp.float8_e4m3fn, jnp.float8_e5m2)
        return is_moved and scales.shape in (per_row, per_block)
    for format in MxFp8(), MxFp8(jnp.float8_e5m2), MxFp4(), NvFp4():
        if (values.dtype, scales.dtype) == (format.dtype, format.scale_dtype):
            return scales.shape == row_scales(format, values.shape)
    return False


def _dispatch_unsupported(avals: list[Aval], params: TransferParams) -> str | None:
    x, (topk_ids, *_) = reference.split_rows(avals)
    return _unsupported(topk_ids.shape, x, params)


def _plan_unsupported(avals: list[Aval], params: TransferParams, **_: bool) -> str | None:
    rows, operands = reference.split_rows(avals)
    plan = PlanArrays.split(operands, params)[0]
    return _unsupported(plan.kept.shape, rows, params)


def _unsupported_on(devices: Any, params: TransferParams, **_: bool) -> str | None:
    if params.domain_size is None:
        return None
    problem = runtime.NETWORK_PROBLEM
    if problem is None:
        return None
    for ids in params.axis.replica_groups():
        if len({host_of(device) for device in devices.ravel()[ids]}) > 1:
            return f"the expert axis spans several hosts, which no network joins: {problem}"
    return problem if network.is_chosen() else None


class Transfer(NamedTuple):
    """A primitive, and what it is defined by."""

    primitive: Primitive
    definition: dict[str, Any]


def _define(operation: str, **definition: Any) -> Transfer:
    definition |= {"unsupported_on": _unsupported_on}
    return Transfer(primitive.define_primitive(operation, **definition), definition)


DISPATCH = _define(
    "dispatch",
    abstract_eval=_dispatch_avals,
    reference=reference.dispatch,
    attributes=_dispatch_attributes,
    unsupported=_dispatch_unsupported,
)

REDISPATCH = _define(
    "redispatch",
    abstract_eval=_redispatch_avals,
    reference=reference.redispatch,
    attributes=_redispatch_attributes,
    unsupported=_plan_unsupported,
)

COMBINE = _define(
    "combine",
    abstract_eval=_combine_avals,
    reference=reference.combine,
    attributes=_combine_attributes,
    unsupported=_plan_unsupported,
)

dispatch_p, redispatch_p, combine_p = (
    transfer.primitive for transfer in (DISPATCH, REDISPATCH, COMBINE)
)
