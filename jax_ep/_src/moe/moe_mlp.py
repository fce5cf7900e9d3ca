"""moe_mlp: dispatch, two grouped matmuls with an activation between them, and combine."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, overload

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep._src.core import checks, compat
from jax_ep._src.core.expert_axis import AxisName, ExpertAxis
from jax_ep._src.matmul.accumulation import Accumulators
from jax_ep._src.matmul.activations import Activation, NamedActivation
from jax_ep._src.matmul.layer_stack import LayerIndex, check_no_layer
from jax_ep._src.mlp.expert_forms import UpBiases, UpWeights
from jax_ep._src.mlp.experts import Experts, check_experts, check_num_experts, with_accumulators
from jax_ep._src.mlp.params import GroupedMlpParams
from jax_ep._src.mlp.quantized_experts import (
    check_quantization,
    shapes_of_quantized,
    weights_only_experts,
    with_quantized,
)
from jax_ep._src.moe.chunks import in_chunks
from jax_ep._src.moe.in_flight import check_overlap, chunks_in_flight
from jax_ep._src.moe.local_only import only_own_experts
from jax_ep._src.moe.moe_experts import function_experts, named_experts
from jax_ep._src.moe.params import MoeMlpParams, Remat, check_weights_on_input
from jax_ep._src.moe.shared_expert import SharedExpert, check_gate, shared_expert_output
from jax_ep._src.moe.stats import Stats, no_stats
from jax_ep._src.moe.users_experts import (
    ExpertsFunction,
    check_adapters,
    check_experts_function,
    users_experts,
)
from jax_ep._src.quant.recipe import QuantizedExperts, Recipe, WeightsOnly
from jax_ep._src.transfer.domains import check_domain_size, warn_of_dropless_rows
from jax_ep._src.transfer.params import TransferParams
from jax_ep._src.transfer.plan import check_num_rows


@overload
def moe_mlp(
    x: jax.Array,
    topk_ids: jax.Array,
    topk_weights: jax.Array | None,
    w_up: UpWeights | Any,
    w_down: jax.Array | Any,
    *,
    axis_name: AxisName,
    num_experts: int | None = None,
    activation: Activation = "swiglu",
    b_up: UpBiases = None,
    b_down: jax.Array | None = None,
    layer: LayerIndex | None = None,
    accumulators: None = None,
    shared_expert: SharedExpert | None = None,
    shared_gate: jax.Array | None = None,
    weights_on_input: bool = False,
    experts_fn: ExpertsFunction | None = None,
    adapters: Any = None,
    local_only: bool = False,
    capacity_factor: float | None = None,
    recv_capacity: int | None = None,
    num_chunks: int = 1,
    remat: Remat = "dispatch",
    quantization: Recipe | WeightsOnly | None = None,
    quantized_weights: QuantizedExperts | None = None,
    nvlink_domain_size: int | None = None,
    overlap: bool | None = None,
    num_comm_sms: int | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, Stats]: ...


@overload
def moe_mlp(
    x: jax.Array,
    topk_ids: jax.Array,
    topk_weights: jax.Array | None,
    w_up: UpWeights | Any,
    w_down: jax.Array | Any,
    *,
    axis_name: AxisName,
    num_experts: int | None = None,
    activation: Activation = "swiglu",
    b_up: UpBiases = None,
    b_down: jax.Array | None = None,
    layer: LayerIndex | None = None,
    accumulators: Accumulators,
    shared_expert: SharedExpert | None = None,
    shared_gate: jax.Array | None = None,
    weights_on_input: bool = False,
    experts_fn: ExpertsFunction | None = None,
    adapters: Any = None,
    local_only: bool = False,
    capacity_factor: float | None = None,
    recv_capacity: int | None = None,
    num_chunks: int = 1,
    remat: Remat = "dispatch",
    quantization: Recipe | WeightsOnly | None = None,
    quantized_weights: QuantizedExperts | None = None,
    nvlink_domain_size: int | None = None,
    overlap: bool | None = None,
    num_comm_sms: int | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, Stats, Accumulators]: ...


def moe_mlp(
    x: jax.Array,
    topk_ids: jax.Array,
    topk_weights: jax.Array | None,
    w_up: UpWeights | Any,
    w_down: jax.Array | Any,
    *,
    axis_name: AxisName,
    num_experts: int | None = None,
    activation: Activation = "swiglu",
    b_up: UpBiases = None,
    b_down: jax.Array | None = None,
    layer: LayerIndex | None = None,
    accumulators: Accumulators | None = None,
    shared_expert: SharedExpert | None = None,
    shared_gate: jax.Array | None = None,
    weights_on_input: bool = False,
    experts_fn: ExpertsFunction | None = None,
    adapters: Any = None,
    local_only: bool = False,
    capacity_factor: float | None = None,
    recv_capacity: int | None = None,
    num_chunks: int = 1,
    remat: Remat = "dispatch",
    quantization: Recipe | WeightsOnly | None = None,
    quantized_weights: QuantizedExperts | None = None,
    nvlink_domain_size: int | None = None,
    overlap: bool | None = None,
    num_comm_sms: int | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, Stats] | tuple[jax.Array, Stats, Accumulators]:
    """Computes a mixture-of-experts layer after its router. Call it inside `jax.shard_map`.

    For each token it sums over the K experts, by `dispatch`, `grouped_mlp` and `combine`,
    ``topk_weights[k] * (activation(x @ w_up[e_k] + b_up[e_k]) @ w_down[e_k] + b_down[e_k])``.
    The epilogue of the second matmul applies the routing weight, whose gradient is a row dot
    product of intermediate activations, so no output row is kept for the backward pass. Activations
    are computed in float32.

    R ranks, L local experts, T tokens per rank, K experts per token, H hidden size, F intermediate
    size.

    In a `shard_map` over ``"expert"``, with w_up [L, H, 2, F] and w_down [L, F, H] of this rank::

        ids, weights, _ = jax_ep.routing.softmax_topk(x @ router, top_k=2)
        y, stats = jax_ep.moe_mlp(x, ids, weights, w_up, w_down, axis_name="expert")

    Args:
      x: [T, H] bfloat16, float16 or float32.
      topk_ids: int32[T, K], as in `dispatch`.
      topk_weights: [T, K] of any float dtype; None sums without weights.
      w_up: this rank's experts, in x's dtype or float32. For a gated activation [L, H, 2, F],
        [L, H, 2F] with the gate first, or a (gate, up) pair of [L, H, F], which is concatenated
        into a copy; for a plain activation [L, H, F].
      w_down: [L, F, H], in x's dtype or float32. With `quantized_weights` both matrices may be
        None, for inference or for gradients of other arrays.
      axis_name: the expert axis, or a tuple of mesh axes that form it together.
      num_experts: E, the experts of all ranks; the weights must hold L = E/R of them. None takes
        E = L*R, and refuses weights that are the same on all ranks, as far as `shard_map` can tell.
        With ``check_vma=False`` it cannot, so num_experts has to be given.
      activation: gated ``"swiglu"``, ``"geglu"``, `ClampedSwiGlu`; plain ``"gelu"`` (tanh form),
        ``"relu"``, ``"relu2"``, ``"silu"``; or a function, as in `grouped_mlp`.
      b_up: [L, 2, F], [L, 2F] or a pair of [L, F]; for a plain activation [L, F]. Of any float
        dtype, or None.
      b_down: [L, H] of any float dtype, or None.
      layer: an int, or an integer scalar on the device such as the index of a scan. w_up, w_down
        and biases are then stacks, [layers, L, ...], of which this layer is read in place.
      accumulators: what `jax_ep.accumulators` or an earlier call returned, as the carry of a scan.
        The gradients of w_up and w_down are added to these in place.
      shared_expert: (w_up, w_down) of an MLP that every token goes through, shaped as those of one
        expert without the dimension L; its F may differ. No transfer waits for it, and it waits for
        none. Its output is added without a weight, unless there is a `shared_gate`.
      shared_gate: [H, 1] of any float dtype. The shared expert's output of a token is multiplied by
        ``sigmoid(x @ shared_gate)``, in float32 (Qwen2-MoE).
      weights_on_input: multiplies the experts' input by the routing weights, not their output
        (Llama-4). The products are rounded to x's dtype.
      experts_fn: computes the experts instead: ``experts_fn(rows, group_sizes, w_up, w_down)`` maps
        rows [M, H] to [M, any size]. w_up and w_down may then be any pytrees, `num_experts` has to
        be given, and combine applies the routing weights, unless the rows have been multiplied by
        them (`weights_on_input`). The tail of rows is zeros.
      adapters: a pytree that `experts_fn` gets as a fifth argument; None gives it four.
      local_only: for calls in which every rank of the axis has all tokens. Each rank computes its
        own experts on them, nothing is sent, and you sum the results:
        ``jax.lax.psum(y, axis_name)``. The first rank adds the shared expert.
      capacity_factor: as in `dispatch`, for the tokens of a chunk.
      recv_capacity: the rows that this rank can receive, as in `dispatch`, shared by all chunks.
      num_chunks: splits the tokens into this many calls, one after another, to bound memory. T must
        be a multiple of it. The calls' gradients of w_up and w_down are summed in float32, in
        place, and rounded once.
      remat: what the backward pass repeats instead of keeping it. None keeps the dispatched rows
        and the pre-activation, and repeats the activation, but keeps the result of a function.
        ``"dispatch"`` does not keep the rows but sends x again along the plan. ``"experts"`` keeps
        neither, so it repeats the first matmul, too (and for a function the dispatch). Of an
        `experts_fn`, ``"experts"`` repeats everything; the others keep what its derivative needs.
      quantization: a `jax_ep.quant.Recipe`, by which the matmuls quantize rows, weights and
        cotangents. It needs a named activation, no biases, and x in bfloat16 or float32. Or a
        `jax_ep.quant.WeightsOnly`, with `quantized_weights` and None as w_up and w_down: a kernel
        reads them, or the call dequantizes them. They get no gradients.
      quantized_weights: w_up and w_down after `jax_ep.quant.quantize_experts` by the same recipe;
        None quantizes them in every call. Either way w_up and w_down get the gradients.
      nvlink_domain_size: the ranks per NVLink domain, as in `dispatch`.
      overlap: whether transfers are in flight (`dispatch_start`) while matmuls leave them SMs. With
        remat=None the shared expert runs beside dispatch, and the experts of a chunk beside the
        dispatch of the next and the combine of the one before. With ``"dispatch"`` the backward
        pass sends x again beside the gradients of rows, which return to their tokens beside those
        of w_up and w_down. None is False, because on one host no shape that was measured gains by
        either.
      num_comm_sms: the most SMs that each transfer uses on CUDA; None chooses.
      implementation: ``"cuda"``, ``"xla"``, or None to choose by platform, dtype and shapes.

    Returns:
      [T, H] in x's dtype, or of the size that `experts_fn` returns, and `Stats`; with accumulators
      a third result, those for the next call.

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
    in_four_bits: QuantizedExperts | None = None
    if isinstance(quantization, WeightsOnly):
        w_up, w_down, in_four_bits = weights_only_experts(
            operation,
            x,
            (w_up, w_down),
            quantization,
            quantized_weights,
            layer,
            needs_floats=experts_fn is not None or accumulators is not None,
        )
        quantization = quantized_weights = None
    experts: Experts | None = None
    of_rows: Activation = "none"
    if experts_fn is None and w_up is None and w_down is None:
        w_up, w_down = shapes_of_quantized(
            operation, x, quantization, quantized_weights, layer, accumulators
        )
    if experts_fn is None:
        experts, of_rows = check_experts(
            operation, "x", x, w_up, w_down, b_up, b_down, activation, layer
        )
        num_layers = None if layer is None else w_down.shape[0]
        num_experts = check_num_experts(operation, experts, axis, num_experts, num_layers)
    else:
        check_experts_function(
            operation, experts_fn, b_up=b_up, b_down=b_down, layer=layer, accumulators=accumulators
        )
        num_experts = checks.num_experts(operation, num_experts, axis)
    if quantization is not None:
        check_no_layer(operation, layer)
    check_quantization(operation, "x", x, experts, of_rows, quantization, quantized_weights)
    if accumulators is not None and experts is not None:
        experts = with_accumulators(operation, experts, accumulators)
    check_gate(operation, shared_gate, shared_expert)
    check_adapters(operation, adapters, experts_fn)
    if weights_on_input:
        check_weights_on_input(operation, quantization)
    checks.num_chunks(operation, num_chunks, x.shape[0])
    checks.remat(operation, remat)
    implementation = checks.implementation(operation, implementation)
    params = MoeMlpParams(
        transfer=_transfer_params(
            operation,
            (x.shape[0] // num_chunks, topk_ids.shape[1]),
            axis,
            num_experts,
            local_only=local_only,
            recv_capacity=recv_capacity,
            capacity_factor=capacity_factor,
            num_chunks=num_chunks,
            zero_tail=experts_fn is not None,  # no operation of jax_ep reads it
            nvlink_domain_size=nvlink_domain_size,
            num_sms=checks.num_sms(operation, num_comm_sms, "num_comm_sms"),
            implementation=implementation,
        ),
        mlp=GroupedMlpParams(
            activation=of_rows if isinstance(of_rows, NamedActivation) else "none",
            zero_tail=False,
            num_sms=0,
            implementation=implementation,
            quantization=quantization,
            row_dtype=None if quantization is None else jnp.dtype(x.dtype),
        ),
        weights_on_input=weights_on_input,
    )
    is_in_flight = check_overlap(
        operation,
        overlap,
        is_named=experts is not None and isinstance(of_rows, NamedActivation),
        remat=remat,
        params=params,
    )
    params = dataclasses.replace(params, is_in_flight=is_in_flight and remat == "dispatch")
    if recv_capacity is None and capacity_factor is None:
        warn_of_dropless_rows(operation, params.transfer, x)
    if experts is not None:
        experts = with_quantized(operation, experts, quantized_weights or in_four_bits)
    x, topk_ids, topk_weights, experts = compat.vary_together(
        (x, topk_ids, topk_weights, experts), axis.names
    )
    if local_only:
        topk_ids = only_own_experts(topk_ids, num_experts, axis)
    if experts_fn is not None:
        arguments = (w_up, w_down) if adapters is None else (w_up, w_down, adapters)
        compute = functools.partial(users_experts, experts_fn, arguments, remat=remat)
    elif isinstance(of_rows, NamedActivation):
        compute = functools.partial(named_experts, remat=remat)
    else:
        compute = functools.partial(function_experts, of_rows, remat=remat)

    with jax.named_scope("jax_ep.moe_mlp"):
        if x.shape[0] == 0:  # on all ranks alike, so that none of them calls a collective
            stats = no_stats(num_experts // axis.size, x)
            return (x, stats) if accumulators is None else (x, stats, accumulators)

        def shared_output(x: jax.Array, sms: int = 0) -> jax.Array:
            assert shared_expert is not None
            out = shared_expert_output(
                x,
                shared_expert,
                shared_gate,
                activation,
                remat=remat,
                implementation=implementation,
                num_sms=sms,
            )
            # The caller's sum then has it once.
            return jnp.where(lax.axis_index(axis.name) == 0, out, 0) if local_only else out

        tokens = x, topk_ids, topk_weights
        beside = None if shared_expert is None else shared_output
        if is_in_flight and remat is None:
            assert experts is not None
            y, stats, sums, shared = chunks_in_flight(tokens, experts, params, num_chunks, beside)
        else:
            shared = None if beside is None else beside(x)
            y, stats, sums = in_chunks(compute, tokens, experts, params, num_chunks)
        y = y.astype(x.dtype)  # as an experts_fn may return another
        if shared is not None:
            checks.shape(operation, "experts_fn's result beside a shared expert", y, shared.shape)
            y = y + shared
        if accumulators is None:
            return y, stats
        return y, stats, sums


def _transfer_params(
    operation: str,
    ids_shape: tuple[int, int],
    axis: ExpertAxis,
    num_experts: int,
    *,
    local_only: bool,
    recv_capacity: int | None,
    capacity_factor: float | None,
    num_chunks: int,
    zero_tail: bool,
    nvlink_domain_size: int | None,
    num_sms: int,
    implementation: str | None,
) -> TransferParams:
    """Returns the parameters of one chunk's transfers; of a layer of one rank for local_only."""
    checks.capacity(operation, recv_capacity, capacity_factor)
    domain_size = check_domain_size(operation, nvlink_domain_size, axis.size)
    if local_only:
        domain_size = None
        num_experts //= axis.size
        if capacity_factor is not None:  # a rank's even share is that of T * K / R assignments
            capacity_factor /= axis.size
        axis = checks.own_axis()
    return TransferParams(
        axis=axis,
        num_experts=num_experts,
        num_rows=check_num_rows(
            operation,
            ids_shape,
            axis,
            num_experts,
            row_align=1,
            recv_capacity=None if recv_capacity is None else -(-recv_capacity // num_chunks),
            capacity_factor=capacity_factor,
        ),
        row_align=1,
        zero_tail=zero_tail,
        num_sms=num_sms,
        implementation=implementation,
        domain_size=domain_size,
    )
