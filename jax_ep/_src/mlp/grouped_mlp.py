"""grouped_mlp: two matmuls with an activation between them, for each group of consecutive rows."""

from __future__ import annotations

from typing import Any

import jax

from jax_ep._src.core import checks, compat
from jax_ep._src.matmul.activations import Activation, NamedActivation
from jax_ep._src.matmul.layer_stack import LayerIndex, check_no_layer
from jax_ep._src.mlp.epilogue_mlp import epilogue_mlp
from jax_ep._src.mlp.expert_forms import UpBiases, UpWeights
from jax_ep._src.mlp.experts import check_experts
from jax_ep._src.mlp.function_mlp import function_mlp_down, function_mlp_up
from jax_ep._src.mlp.params import GroupedMlpParams
from jax_ep._src.mlp.quantized_experts import (
    check_quantization,
    shapes_of_quantized,
    weights_only_experts,
    with_quantized,
)
from jax_ep._src.mlp.quantized_mlp import quantized_mlp
from jax_ep._src.quant.recipe import QuantizedExperts, Recipe, WeightsOnly
from jax_ep._src.transfer import weighted


def grouped_mlp(
    rows: jax.Array,
    w_up: UpWeights | None,
    w_down: jax.Array | None,
    group_sizes: jax.Array,
    row_weights: jax.Array | None = None,
    *,
    activation: Activation = "swiglu",
    b_up: UpBiases = None,
    b_down: jax.Array | None = None,
    layer: LayerIndex | None = None,
    zero_tail: bool = True,
    quantization: Recipe | WeightsOnly | None = None,
    quantized_weights: QuantizedExperts | None = None,
    num_sms: int | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Runs each group of rows through its own two-layer perceptron, as a layer's experts do.

    Row m, in group g, becomes
    ``row_weights[m] * (activation(rows[m] @ w_up[g] + b_up[g]) @ w_down[g] + b_down[g])``.
    Accumulators and activations are float32. On CUDA the matmuls' epilogues compute biases, a named
    activation, weights and their gradients. It is not a collective, so it works inside and outside
    `shard_map`. For the backward pass it keeps its arguments and the pre-activation.

    M rows, L groups, H hidden size, F intermediate size.

    Three experts, of which the second has no rows::

        rows, w_up, w_down = jnp.ones((8, 16)), jnp.ones((3, 16, 2, 32)), jnp.ones((3, 32, 16))
        y = jax_ep.grouped_mlp(rows, w_up, w_down, jnp.array([3, 0, 5]))  # [8, 16]

    Args:
      rows: [M, H] bfloat16, float16 or float32.
      w_up: in rows' dtype or float32 (master weights), as rhs of `grouped_matmul`. For a gated
        activation [L, H, 2, F], [L, H, 2F] with the gate first, or a (gate, up) pair of [L, H, F],
        which is concatenated into a copy; for a plain activation [L, H, F].
      w_down: [L, F, H], in rows' dtype or float32. With `quantized_weights` both matrices may be
        None, for inference or for gradients of other arrays.
      group_sizes: integer[L], as in `grouped_matmul`.
      row_weights: [M] of any float dtype, or None for weights of 1. If given, give `combine` None.
      activation: gated ``"swiglu"``, ``"geglu"``, `ClampedSwiGlu`; plain ``"gelu"`` (tanh form),
        ``"relu"``, ``"relu2"``, ``"silu"``; or a function, which runs between the matmuls and
        returns float32 [M, F] from gate and up [M, F] (two arguments), or from [M, 2, F] (gated
        weights) or [M, F].
      b_up: [L, 2, F], [L, 2F] or a pair of [L, F]; for a plain activation [L, F]. Of any float
        dtype, or None.
      b_down: [L, H] of any float dtype, or None.
      layer: an int, or an integer scalar on the device. w_up, w_down and biases are then stacks,
        [layers, L, ...], as in `grouped_matmul`.
      zero_tail: whether the rows past the last group are zeros, in the result and in the gradients
        of rows and row_weights. False leaves them unspecified, which is faster with biases or row
        weights. The tails of the arguments and of the cotangent are never read.
      quantization: a `jax_ep.quant.Recipe`, by which the matmuls quantize rows, weights and
        cotangents. It needs a named activation, no biases, and rows in bfloat16 or float32. Or a
        `jax_ep.quant.WeightsOnly`, with `quantized_weights` and None as w_up and w_down: a kernel
        reads them, or the call dequantizes them. They get no gradients.
      quantized_weights: w_up and w_down after `jax_ep.quant.quantize_experts` by the same recipe;
        None quantizes them in every call. Either way w_up and w_down get the gradients.
      num_sms: the most SMs that each matmul uses on CUDA; None chooses. GPUs of compute capability
        9.0 use them in pairs, so odd numbers are rounded down, and 1 is rounded up.
      implementation: ``"cuda"``, ``"xla"``, or None to choose by platform, dtype and shapes.

    Returns:
      [M, H] in rows' dtype.

    Raises:
      ArgumentError (a ValueError): shapes or an activation that do not fit, or an operand sharded
        over an Explicit mesh axis.
      DtypeError (a TypeError): a dtype not listed above.
      UnavailableError (a NotImplementedError): ``implementation="cuda"`` where it cannot run.
    """
    operation = "grouped_mlp"
    checks.rows(operation, "rows", rows, ("rows", "hidden"))
    in_four_bits: QuantizedExperts | None = None
    if isinstance(quantization, WeightsOnly):
        w_up, w_down, in_four_bits = weights_only_experts(
            operation, rows, (w_up, w_down), quantization, quantized_weights, layer
        )
        quantization = quantized_weights = None
    up: Any = w_up
    down: Any = w_down
    if w_up is None and w_down is None:
        up, down = shapes_of_quantized(operation, rows, quantization, quantized_weights, layer)
    experts, activation = check_experts(
        operation, "rows", rows, up, down, b_up, b_down, activation, layer
    )
    if quantization is not None:
        check_no_layer(operation, layer)
    check_quantization(
        operation, "rows", rows, experts, activation, quantization, quantized_weights
    )
    num_layers = 1 if layer is None else down.shape[0]
    num_local = experts.w_up.shape[0] // num_layers
    experts = with_quantized(operation, experts, quantized_weights or in_four_bits)
    group_sizes = experts.group_sizes(checks.group_sizes(operation, group_sizes, num_local))
    if row_weights is not None:
        row_weights = checks.weights(operation, "row_weights", row_weights, (rows.shape[0],))
    params = GroupedMlpParams(
        activation=activation if isinstance(activation, NamedActivation) else "none",
        zero_tail=zero_tail,
        num_sms=checks.num_sms(operation, num_sms),
        implementation=checks.implementation(operation, implementation),
        quantization=quantization,
    )
    rows, experts, group_sizes, row_weights = compat.vary_together(
        (rows, experts, group_sizes, row_weights)
    )
    with jax.named_scope("jax_ep.grouped_mlp"):
        if isinstance(activation, NamedActivation):
            mlp = epilogue_mlp if quantization is None else quantized_mlp
            y, _ = mlp(rows, experts, group_sizes, row_weights, params)
        else:
            pre_activation, _ = function_mlp_up(rows, experts, group_sizes, params)
            y, _ = function_mlp_down(
                pre_activation, experts, group_sizes, row_weights, activation, params
            )
    if row_weights is not None:
        weighted.mark(y)
    return y
