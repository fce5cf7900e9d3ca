"""moe_mlp: dispatch, two grouped matmuls with an activation between them, and combine."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep._src import checks, compat
from jax_ep._src.accumulation import Accumulation, Accumulators, stand_in
from jax_ep._src.activations import Activation
from jax_ep._src.combine import combine
from jax_ep._src.experts import Experts, UpBiases, UpWeights, check_experts, check_num_experts
from jax_ep._src.mesh import AxisName
from jax_ep._src.moe_experts import function_experts, named_experts
from jax_ep._src.params import GroupedMlpParams, MoeMlpParams, Remat
from jax_ep._src.plan import Plan


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stats:
    """Counts of one `moe_mlp` call: a pytree. Later versions may add members.

    Every array has one dimension, so that one ``P(axis_name)`` takes all out of `shard_map`: the
    counts of all ranks are then concatenated. Token chunks are summed; status is their largest.

    Attributes:
      num_dropped: int32[1], assignments to this rank that did not fit into its capacity.
      num_received: int32[1], assignments to this rank, dropped ones included.
      num_bad_ids: int32[1], ids of this rank's tokens outside [-1, E).
      expert_load: int32[L], rows that each local expert computed, without padding.
      status: int32[1], 0 if the exchange succeeded; `jax_ep.check()` raises the reason.
    """

    num_dropped: jax.Array
    num_received: jax.Array
    num_bad_ids: jax.Array
    expert_load: jax.Array
    status: jax.Array


def moe_mlp(
    x: jax.Array,
    topk_ids: jax.Array,
    topk_weights: jax.Array | None,
    w_up: UpWeights,
    w_down: jax.Array,
    *,
    axis_name: AxisName,
    num_experts: int | None = None,
    activation: Activation = "swiglu",
    b_up: UpBiases = None,
    b_down: jax.Array | None = None,
    capacity_factor: float | None = None,
    recv_capacity: int | None = None,
    num_chunks: int = 1,
    remat: Remat = "dispatch",
    num_comm_sms: int | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, Stats]:
    """A mixture-of-experts layer after its router. Call it inside `jax.shard_map`.

    Returns for each token the sum over its K experts of
    ``topk_weights[k] * (activation(x @ w_up[e_k] + b_up[e_k]) @ w_down[e_k] + b_down[e_k])``.
    It is `dispatch`, `grouped_mlp` and `combine`. The routing weight multiplies in the epilogue of
    the second matmul; its gradient is a row dot product of intermediate activations, so that no
    output row is kept for the backward pass. Activations are computed in float32.

    R ranks, L local experts, T tokens per rank, K experts per token, H hidden size, F intermediate
    size.

    Args:
      x: [T, H] bfloat16, float16 or float32.
      topk_ids: int32[T, K], as in `dispatch`.
      topk_weights: [T, K] of any float dtype; None sums without weights.
      w_up: this rank's experts. For a gated activation [L, H, 2, F], [L, H, 2F] with the gate
        first, or a (gate, up) pair of [L, H, F], which is concatenated: a copy. For a plain
        activation [L, H, F]. In x's dtype or float32.
      w_down: [L, F, H], in x's dtype or float32.
      axis_name: the expert axis, or a tuple of mesh axes that are it together.
      num_experts: E, the experts of all ranks, of which the weights must be L = E/R. None takes
        E = L*R, and refuses weights that are the same on all ranks, where `shard_map` tells
        (``check_vma=True``).
      activation: gated ``"swiglu"``, ``"geglu"``; plain ``"gelu"`` (tanh form), ``"relu"``,
        ``"relu2"``, ``"silu"``; or a function, as in `grouped_mlp`.
      b_up: [L, 2, F], [L, 2F] or a pair of [L, F]; for a plain activation [L, F]; or None. Of any
        float dtype.
      b_down: [L, H] of any float dtype, or None.
      capacity_factor: as in `dispatch`, for the tokens of a chunk.
      recv_capacity: the rows that this rank can receive, as in `dispatch`, shared by all chunks.
      num_chunks: splits the tokens into this many calls, one after another, to bound memory. T must
        be a multiple of it. The calls' gradients of w_up and w_down are summed in float32, in
        place, and rounded once.
      remat: what the backward pass repeats rather than keeps. None keeps the dispatched rows and
        the pre-activation, and repeats the activation (it keeps the result of a function).
        ``"dispatch"`` does not keep the rows: it sends x again along the plan. ``"experts"`` keeps
        neither: it also repeats the first matmul (and for a function the dispatch).
      num_comm_sms: the most SMs that each transfer uses on CUDA; None chooses.
      implementation: ``"cuda"``, ``"xla"``, or None to choose by platform, dtype and shapes.

    Returns:
      [T, H] in x's dtype, and `Stats`.

    Raises:
      ArgumentError (a ValueError): shapes or values that do not fit, weights that are the same on
        all ranks, or a call outside `shard_map`.
      DtypeError (a TypeError): a dtype not listed above.
      UnavailableError (a NotImplementedError): ``implementation="cuda"`` where it cannot run.
    """
    operation = "moe_mlp"
    axis = checks.expert_axis(operation, axis_name)
    checks.rows(operation, "x", x, ("tokens", "hidden"))
    checks.topk_ids(operation, topk_ids, x.shape[0])
    if topk_weights is not None:
        topk_weights = checks.weights(operation, "topk_weights", topk_weights, topk_ids.shape)
    experts, activation = check_experts(operation, "x", x, w_up, w_down, b_up, b_down, activation)
    num_experts = check_num_experts(operation, experts, axis, num_experts)
    checks.capacity(operation, recv_capacity, capacity_factor)
    checks.num_chunks(operation, num_chunks, x.shape[0])
    checks.remat(operation, remat)
    checks.num_sms(operation, num_comm_sms, "num_comm_sms")
    params = MoeMlpParams(
        num_experts=num_experts,
        axis_name=axis.name,
        recv_capacity=None if recv_capacity is None else -(-recv_capacity // num_chunks),
        capacity_factor=capacity_factor,
        num_comm_sms=num_comm_sms,
        implementation=implementation,
        mlp=GroupedMlpParams(
            activation=activation if isinstance(activation, str) else "none",
            zero_tail=False,  # combine, also as dispatch's gradient, does not read it
            num_sms=0,
            implementation=checks.implementation(operation, implementation),
        ),
    )
    x, topk_ids, topk_weights, experts = compat.vary_together(
        (x, topk_ids, topk_weights, experts), axis.names
    )
    if isinstance(activation, str):
        compute = functools.partial(named_experts, remat=remat)
    else:
        compute = functools.partial(function_experts, activation, remat=remat)

    def one_chunk(
        chunk: tuple[Any, ...],
        experts: Experts,
        params: MoeMlpParams,
    ) -> tuple[jax.Array, Stats, Accumulators]:
        y, plan, accumulators = compute(*chunk, experts=experts, params=params)
        out = combine(y, plan, None, num_sms=num_comm_sms, implementation=implementation)
        return out, _stats(plan), accumulators

    with jax.named_scope("jax_ep.moe_mlp"):
        if x.shape[0] == 0:  # on all ranks alike, so that none of them calls a collective
            counts = [jnp.zeros(n, jnp.int32) for n in (1, 1, 1, experts.w_up.shape[0], 1)]
            return x, Stats(*(compat.vary_over(n, compat.varying_axes(x)) for n in counts))
        tokens = x, topk_ids, topk_weights
        if num_chunks == 1:
            return one_chunk(tokens, experts, params)[:2]
        # The chunks are a chain: each adds its gradients of the matrices to those of later ones.
        accumulators = Accumulators(stand_in(experts.w_up), stand_in(experts.w_down))
        outs: list[jax.Array] = []
        all_stats: list[Stats] = []
        for chunk in zip(*(_split(a, num_chunks) for a in tokens), strict=True):
            is_last = len(outs) + 1 == num_chunks
            out, stats, accumulators = one_chunk(
                chunk,
                experts._replace(accumulators=accumulators),
                params.accumulating(Accumulation.FIRST if is_last else Accumulation.NEXT),
            )
            outs.append(out)
            all_stats.append(stats)
        return jnp.concatenate(outs), _sum(all_stats)


def _split(a: jax.Array | None, num_chunks: int) -> Sequence[jax.Array | None]:
    return [None] * num_chunks if a is None else jnp.split(a, num_chunks)


def _stats(plan: Plan) -> Stats:
    return Stats(
        num_dropped=plan.num_dropped,
        num_received=plan.num_received,
        num_bad_ids=plan.num_bad_ids,
        expert_load=plan.real_group_sizes,
        status=plan.status,
    )


def _sum(chunks: list[Stats]) -> Stats:
    total = jax.tree.map(lambda *counts: jnp.stack(counts).sum(0), *chunks)
    status = jnp.stack([stats.status for stats in chunks]).max(0)
    return dataclasses.replace(total, status=status)
