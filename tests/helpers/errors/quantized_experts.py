"""Mistakes with quantized weights of experts, in operations and layers: calls, by the class of their error."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_ep
import jax_ep.linen
import jax_ep.nnx
from errors.common import ROW, inside
from errors.experts import grouped_mlp
from errors.layers import layer
from errors.quantization import FOR_TRAINING
from jax_ep import quant


def quantize_weights(variables):
    """A call of linen.MoE.quantize_weights with one thing wrong."""
    jax_ep.linen.MoE(8, 4, 8, 2, quantization=quant.Recipe()).quantize_weights(variables)


UP, DOWN = np.ones((8, 8, 2, 4), np.float32), np.ones((8, 4, 8), np.float32)
EXPERTS = quant.quantize_experts(UP, DOWN, quant.Recipe())
WEIGHTS_ONLY = quant.WeightsOnly(quant.MxFp4())
EXPERTS_WITH_OTHER_SCALES = [
    quant.QuantizedWeights(one.forward, one.forward.mT)
    for one in quant.quantize_experts(UP, DOWN, quant.Recipe(ROW))
]


def moe_mlp_without_matrices(**options):
    """A call of moe_mlp without float matrices."""
    recipe = {"quantization": quant.Recipe()} if "quantized_weights" in options else {}
    options = {"axis_name": "expert"} | recipe | options
    inside(lambda *arrays: jax_ep.moe_mlp(*arrays, None, None, **options)[0])


def quantize_without_matrices():
    layer = jax_ep.nnx.MoE(
        8, 4, 8, 2, quantization=quant.Recipe(), quantized_only=True, rngs=nnx.Rngs(0)
    )
    layer.quantize_weights()


def quantize_without_a_recipe():
    jax_ep.nnx.MoE(8, 4, 8, 2, rngs=nnx.Rngs(0)).quantize_weights()


PRODUCERS = {
    "ArgumentError": [
        lambda: layer(quantized=EXPERTS, fsdp_axis="data", quantization=quant.Recipe()),
        quantize_without_a_recipe,
        quantize_without_matrices,
        lambda: layer(quantized_only=True),
        lambda: layer(quantization=WEIGHTS_ONLY),
        lambda: grouped_mlp(quantization=WEIGHTS_ONLY),
        lambda: layer(quantized_only=True, quantization=quant.Recipe()),
        moe_mlp_without_matrices,
        lambda: moe_mlp_without_matrices(quantized_weights=EXPERTS, quantization=None),
        lambda: moe_mlp_without_matrices(quantized_weights=EXPERTS, layer=0),
        lambda: moe_mlp_without_matrices(quantized_weights=EXPERTS, accumulators=(UP, DOWN)),
        lambda: quant.experts_from_checkpoint((FOR_TRAINING.forward,) * 3, FOR_TRAINING.forward),
        lambda: quant.experts_from_checkpoint((FOR_TRAINING.forward,) * 2, FOR_TRAINING.forward),
        lambda: grouped_mlp(quantization=quant.Recipe(), b_down=jnp.ones((1, 8))),
        lambda: layer(quantized=EXPERTS_WITH_OTHER_SCALES, quantization=quant.Recipe(ROW)),
        lambda: quantize_weights({}),
        lambda: quantize_weights(UP),
        lambda: quantize_weights({"params": {"w_up": UP[None], "w_down": DOWN[None]}}),
        lambda: layer(
            weights_on_input=True, quantization=quant.Recipe(ROW, quantized_dispatch=True)
        ),
        lambda: quant.quantize_experts(DOWN, UP, quant.Recipe()),
        lambda: quant.quantize_experts(UP[:2], DOWN, quant.Recipe()),
        lambda: quant.quantize_experts((UP[:, :, 0], UP[:, :4, 1]), DOWN, quant.Recipe()),
        lambda: quant.quantize_experts((), DOWN, quant.Recipe()),
    ],
    "DtypeError": [
        lambda: quant.quantize_for_training(DOWN, WEIGHTS_ONLY),
        lambda: layer(quantized=EXPERTS[0], quantization=quant.Recipe()),
        lambda: quant.experts_from_checkpoint(UP, FOR_TRAINING.forward),
        lambda: moe_mlp_without_matrices(quantized_weights=(UP, DOWN)),
        lambda: grouped_mlp(quantization=quant.Recipe(), quantized_weights=EXPERTS[0]),
        lambda: grouped_mlp(quantization=quant.Recipe(), quantized_weights=(*EXPERTS, None)),
    ],
}
