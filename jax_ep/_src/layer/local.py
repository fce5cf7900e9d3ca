"""The layer on one rank: its tokens are routed, and its experts computed by `moe_mlp`."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep._src.core import checks
from jax_ep._src.core.traced import Traced
from jax_ep._src.layer import sharded_weights as quantized_experts
from jax_ep._src.layer.config import Axes, Config
from jax_ep._src.layer.identity import identity_output, sent_ids
from jax_ep._src.layer.padded_experts import local_padded
from jax_ep._src.layer.router import LAYER, NAMED_ROUTERS
from jax_ep._src.layer.tokens import (
    flatten,
    pad,
    pad_ids,
    some_token,
    token_indices,
)
from jax_ep._src.matmul.accumulation import Accumulators
from jax_ep._src.moe.moe_mlp import moe_mlp
from jax_ep._src.moe.shared_expert import shared_expert_output
from jax_ep._src.quant.recipe import QuantizedExperts
from jax_ep._src.routing import losses, routers


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class MoEStats:
    """Losses and counts of one call over all ranks' tokens: a pytree, which may get more members.

    Attributes:
      aux_loss: f32[], `routing.balancing_loss`, not scaled: 1 when the load is even.
      z_loss: f32[], `routing.z_loss`, not scaled.
      expert_load: i32[E], the assignments to each expert, including dropped ones.
      num_dropped: i32[], the assignments that exceeded the capacity; 0 without a capacity if each
        token's experts are distinct.
      topk_ids: i32[..., K] for x of shape [..., H], with `record_ids`: the experts of each token,
        best first, dropped ones included; -1 for masked tokens. None otherwise.
    """

    aux_loss: jax.Array
    z_loss: jax.Array
    expert_load: jax.Array
    num_dropped: jax.Array
    topk_ids: jax.Array | None = None


class RouterArrays(NamedTuple):
    """The arrays of a router that has no name."""

    own: list[Any]  # leaves of the pytree that it is
    closed_over: list[Any]


class LayerArrays(NamedTuple):
    """The arrays of a layer, and their specs. Those that a layer lacks are None.

    With `layer`, the experts' are stacks of layers, of which this one is used.
    """

    router_kernel: Any  # [H, E]; all sizes E of routing count identity experts
    w_up: Any = None  # [E, H, 2, F] or [E, H, F]; with a latent size D, H of the experts is D
    w_down: Any = None  # [E, F, H]
    b_up: Any = None  # [E, 2, F] or [E, F]
    b_down: Any = None  # [E, H]
    latent_in: Any = None  # [H, D]
    latent_out: Any = None  # [D, H]
    shared_w_up: Any = None  # [H, 2, shared F] or [H, shared F]
    shared_w_down: Any = None  # [shared F, H]
    shared_gate: Any = None  # [H, 1]
    logits_bias: Any = None  # [E]
    selection_bias: Any = None  # [E]
    router: Any = None  # `RouterArrays` of one that has no name
    functions: Any = ()  # lists of arrays that the activation and experts_fn close over
    held: Any = ()  # lists of arrays that the activation and experts_fn hold, by option
    quantized: QuantizedExperts | None = None  # w_up and w_down, quantized
    layer: Any = None  # int32[]
    sums: Any = None  # `Accumulators` of one rank after another
    topk_ids: Any = None  # int32[..., K], to route by
    adapters: Any = None  # a pytree of arrays [E, ...] for experts_fn


Outputs = tuple[jax.Array, MoEStats, Accumulators | None]


def local_layer(
    config: Config,
    router: Traced | None,
    axes: Axes,
    arrays: LayerArrays,
    x: jax.Array,
    token_mask: jax.Array | None,
) -> Outputs:
    """The layer on one rank: x is this rank's tokens, the weights this rank's shards."""
    if not x.size:  # on all ranks alike
        zero, load = jnp.zeros(()), jnp.zeros(config.num_logits, jnp.int32)
        ids = jnp.zeros((*x.shape[:-1], config.top_k), jnp.int32) if config.record_ids else None
        stats = MoEStats(zero, zero, load, load[0], ids)
        return x.astype(config.dtype or x.dtype), stats, arrays.sums
    tokens, mask, logits = tokens_and_logits(config, arrays, x, token_mask)
    if router is None:
        assert config.router is not None
        route = NAMED_ROUTERS[config.router]
        given = given_ids(arrays, logits)
        routed = route(logits, config.top_k, bias=arrays.selection_bias, topk_ids=given)
    else:
        arguments = router_arguments(axes, arrays, x, logits)
        routed = router(arrays.router.closed_over, *arguments)
    if mask is not None:
        routed = routers.masked(routed, mask)

    y, num_dropped, sums = _experts(config, axes, arrays, tokens, routed, config.dtype or x.dtype)
    if mask is not None and arrays.shared_w_up is not None:
        y = jnp.where(mask[:, None], y, 0)
    stats = MoEStats(
        aux_loss=losses.balancing_loss(
            routed.probabilities, routed.topk_ids, token_axes=axes.tokens
        ),
        z_loss=losses.z_loss(logits, token_mask=mask, token_axes=axes.tokens),
        expert_load=losses.load(routed.topk_ids, config.num_logits, token_axes=axes.tokens),
        num_dropped=num_dropped,
        topk_ids=_of_tokens(x, routed.topk_ids) if config.record_ids else None,
    )
    return _of_tokens(x, y), stats, sums


def _of_tokens(x: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns the rows of x's tokens [..., H], without those of padding, in its shape."""
    return rows[: math.prod(x.shape[:-1])].reshape(*x.shape[:-1], rows.shape[-1])


def given_ids(arrays: LayerArrays, logits: jax.Array) -> jax.Array | None:
    """Returns the ids [T, K] to route by, -1 for padding, or None."""
    if arrays.topk_ids is None:
        return None
    ids = arrays.topk_ids.reshape(-1, arrays.topk_ids.shape[-1])
    return pad_ids(ids, logits.shape[0])


def router_arguments(
    axes: Axes, arrays: LayerArrays, x: jax.Array, logits: jax.Array
) -> tuple[Any, ...]:
    indices = token_indices(axes, x, logits.shape[0])
    ids = given_ids(arrays, logits)
    return logits, arrays.selection_bias, arrays.router.own, indices, ids


def tokens_and_logits(
    config: Config, arrays: LayerArrays, x: jax.Array, token_mask: jax.Array | None
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """Tokens [T, H], padded for chunks, with their mask, and the router's logits float32[T, E]."""
    tokens, mask = pad(*flatten(x, token_mask), config.num_chunks)
    if mask is not None:
        # NaN in padding reaches no gradient.
        filler: Any = 0 if arrays.shared_w_up is None or not x.size else some_token(tokens, mask)
        tokens = jnp.where(mask[:, None], tokens, filler)
    logits = jnp.dot(
        tokens.astype(jnp.float32),
        arrays.router_kernel.astype(jnp.float32),
        precision=lax.Precision.HIGHEST,  # TF32 would select other experts
    )
    if arrays.logits_bias is not None:
        logits = logits + arrays.logits_bias.astype(jnp.float32)[None]
    if mask is not None:
        logits = jnp.where(mask[:, None], logits, 0)  # with a bias
    return tokens, mask, logits


def _experts(
    config: Config,
    axes: Axes,
    arrays: LayerArrays,
    tokens: jax.Array,
    routed: routers.Routing,
    dtype: Any,
) -> tuple[jax.Array, jax.Array, Accumulators | None]:
    """The experts' summed outputs [T, H], the assignments dropped on all ranks, and the sums."""
    ids, exchange = sent_ids(config, routed.topk_ids), axes.expert
    num_padded_experts = local_padded(
        arrays.w_down, arrays.quantized, is_stack=arrays.layer is not None
    )
    capacity_factor, recv_capacity = config.capacity_factor, None
    if exchange:
        num_padded_experts *= lax.axis_size(exchange)
        if num_padded_experts > config.num_experts:
            ids = jnp.where(ids < config.num_experts, ids, num_padded_experts)  # a bad id stays one
        if num_padded_experts > config.num_experts and capacity_factor is not None:
            # The even share is that of a rank without padding.
            capacity_factor *= num_padded_experts / config.num_experts
    else:
        # Every rank has copies of all experts. As experts of their own they are addressed here.
        exchange = axes.tokens
        first_id = lax.axis_index(exchange) * num_padded_experts
        ids = jnp.where((ids >= 0) & (ids < config.num_experts), first_id + ids, -1)
        num_padded_experts *= lax.axis_size(exchange)
        capacity_factor, recv_capacity = None, max(1, ids.size)
    b_down = arrays.b_down

    def whole(matrix: Any, hidden_axis: int) -> Any:
        """Gathers a matrix over the FSDP axis. float32 stays so: its gradient then is float32."""
        if matrix is None:
            return None
        if axes.fsdp:
            matrix = lax.all_gather(matrix, axes.fsdp, axis=hidden_axis, tiled=True)
        return matrix if matrix.dtype == jnp.float32 else matrix.astype(dtype)

    shared_expert = None
    if arrays.shared_w_up is not None:
        shared_expert = whole(arrays.shared_w_up, 0), whole(arrays.shared_w_down, 1)
    rows = tokens = tokens.astype(dtype)
    shared: Callable[[], jax.Array] | None = None
    if config.latent_size is not None:
        rows = jnp.dot(tokens, whole(arrays.latent_in, 0).astype(dtype))
        if shared_expert is not None:  # gets the tokens, which moe_mlp does not
            shared = functools.partial(
                shared_expert_output,
                tokens,
                shared_expert,
                arrays.shared_gate,
                config.activation,
                remat=config.remat,
                implementation=config.implementation,
            )
    if axes.tensor and b_down is not None:  # the sum over the axis has it once
        b_down = jnp.where(lax.axis_index(axes.tensor) == 0, b_down, 0)
    y, stats, *sums = moe_mlp(
        rows,
        ids,
        routed.topk_weights,
        whole(arrays.w_up, 1),
        whole(arrays.w_down, 2),
        axis_name=exchange,
        num_experts=num_padded_experts,
        activation=config.activation,
        b_up=arrays.b_up,
        b_down=b_down,
        layer=arrays.layer,
        accumulators=arrays.sums,
        shared_expert=None if shared else shared_expert,
        shared_gate=None if shared else arrays.shared_gate,
        weights_on_input=config.weights_on_input,
        experts_fn=config.experts_fn,
        adapters=arrays.adapters,
        local_only=config.local_only,
        capacity_factor=capacity_factor,
        recv_capacity=recv_capacity,
        num_chunks=config.num_chunks,
        remat=config.remat,
        quantization=config.quantization,
        quantized_weights=quantized_experts.gather(axes, arrays.quantized),
        nvlink_domain_size=config.nvlink_domain_size if axes.expert else None,
        overlap=config.overlap,
        num_comm_sms=config.num_comm_sms,
        implementation=config.implementation,
    )
    local = axes.expert if config.local_only else ()
    if local:
        y = lax.psum(y, local)
    num_dropped = lax.psum(stats.num_dropped[0], (*axes.tokens, *local))
    if axes.tensor:
        y = lax.psum(y, axes.tensor)
        num_dropped = lax.pmax(num_dropped, axes.tensor)  # equal on all of them
    if config.latent_size is not None:
        checks.shape(LAYER, "the experts' output", y, rows.shape)
        y = jnp.dot(y, whole(arrays.latent_out, 1).astype(dtype))
    if shared is not None:
        y = y + (lax.psum(shared(), axes.tensor) if axes.tensor else shared())
    if config.num_identity_experts:
        checks.shape(LAYER, "the experts' output", y, tokens.shape)
        y = y + identity_output(config, tokens, routed)
    return y, num_dropped, sums[0] if sums else None
