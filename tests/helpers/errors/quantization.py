"""Mistakes with quantized arrays, and with matmuls of them: calls, by the class of their error."""

from __future__ import annotations

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
from flax import serialization

import jax_ep
from errors.common import IDS, ROW, X
from jax_ep import quant

EIGHT_BIT = X.astype(jnp.float8_e4m3fn)


def symbolic_row_size():
    rows = jax.ShapeDtypeStruct((4, *jax.export.symbolic_shape("size")), np.float32)
    jax.eval_shape(lambda x: quant.quantize(x, quant.Fp8Block128()).values, rows)


def quantized_matmul(rhs=None, **options):
    lhs = quant.quantize(X[:4], quant.Fp8Row())
    if rhs is None:
        rhs = quant.quantize_weights(np.ones((2, 8, 8), np.float32), quant.Fp8Row())
    return jax_ep.grouped_matmul(lhs, rhs, np.ones(2, np.int32), **options)


FOR_TRAINING = quant.quantize_for_training(np.ones((2, 8, 8), np.float32), quant.Recipe())


def matmul_by_recipe(recipe=quant.Recipe(), shape=(2, 8, 8), dtype=np.float32, **options):
    lhs, rhs = X[:4].astype(dtype), np.ones(shape, dtype)
    return jax_ep.grouped_matmul(lhs, rhs, np.ones(2, np.int32), quantization=recipe, **options)


def gradient_of_quantized_weights():
    jax.grad(lambda weights: matmul_by_recipe(quantized_rhs=weights).sum())(FOR_TRAINING)


def gradient_by_one_layout():
    """A scale per channel belongs to one direction."""
    recipe, rhs = quant.Recipe(ROW), np.ones((2, 8, 8), np.float32)
    forward = quant.QuantizedWeights(quant.quantize_for_training(rhs, recipe).forward)
    options = {"quantization": recipe, "quantized_rhs": forward}
    matmul = functools.partial(jax_ep.grouped_matmul, **options)
    jax.grad(lambda lhs: matmul(lhs, rhs, np.ones(2, np.int32)).sum())(X[:4])


PRODUCERS = {
    "ArgumentError": [
        lambda: quant.blocked_scales(X),
        lambda: quant.blocked_scales(jnp.ones((2, 2), jnp.uint8), X),
        lambda: quant.Fp8Block128("up"),
        lambda: quant.Fp8Block128(min_amax=0),
        lambda: quant.dequantize(quant.Quantized(EIGHT_BIT, X[:, :2], quant.Fp8Block128())),
        lambda: quant.dequantize(quant.Quantized(EIGHT_BIT, X[0], quant.Fp8Row())),
        lambda: quant.quantize(np.ones((1, 129)), quant.Fp8Block128()).to_qwix(),
        lambda: serialization.from_state_dict(FOR_TRAINING.forward, {"values": X}),
        lambda: quant.Quantized.from_qwix(
            types.SimpleNamespace(zero_point=X[:, :1]), quant.Fp8Row()
        ),
        lambda: quant.quantize(X, quant.Fp8Row(), scales=X),
        lambda: quant.quantize(X[:, :0], quant.Fp8Row()),
        lambda: quant.quantize_weights(X[0], quant.Fp8Row()),
        lambda: quant.Recipe(quant.Fp8Row(), quant.Fp8Block128()),
        lambda: quant.Recipe(quant.NvFp4()),
        lambda: quant.quantize(X, ROW, tensor_scale=1.0),
        lambda: matmul_by_recipe(quant.Recipe(quant.Fp8Row()), quantized_rhs=FOR_TRAINING),
        lambda: matmul_by_recipe(shape=(2, 8, 6), quantized_rhs=FOR_TRAINING),
        lambda: matmul_by_recipe(None, quantized_rhs=FOR_TRAINING),
        lambda: quantized_matmul(quantization=quant.Recipe()),
        symbolic_row_size,
    ],
    "DtypeError": [
        lambda: quant.Fp8Row(jnp.float8_e4m3b11fnuz),
        lambda: quant.quantize(X, "fp8"),
        lambda: quant.quantize(X, quant.Fp8Row),
        lambda: quant.quantize(IDS, quant.Fp8Row()),
        lambda: quant.dequantize(quant.Quantized(X, X[:, :1], quant.Fp8Row())),
        lambda: quant.dequantize(quant.Quantized(EIGHT_BIT, EIGHT_BIT, quant.Fp8Row())),
        lambda: quant.dequantize(X),
        lambda: quant.dequantize(quant.quantize(X, ROW), jnp.int32),
        lambda: quant.dequantize(quant.quantize(X, ROW), jnp.float8_e4m3fn),
        lambda: quant.dequantize(quant.quantize(X, ROW), "fp8"),
        lambda: quant.dequantize(quant.Quantized(EIGHT_BIT, X[:, :1], quant.Fp8Row)),
        lambda: quant.dequantize(quant.Quantized(EIGHT_BIT, X[:, :1], "fp8")),
        lambda: quant.dequantize(quant.Quantized(EIGHT_BIT, 1.0, ROW)),
        lambda: quant.quantize(X, quant.NvFp4(), tensor_scale=X[0]),
        lambda: quant.Quantized.from_qwix(X, ROW),
        lambda: quant.Fp8Row("fp8"),
        lambda: quant.quantize(EIGHT_BIT, ROW),
        lambda: quant.quantize(quant.quantize(X, ROW), ROW),
        lambda: quant.quantize(X, ROW, scales="auto"),
        lambda: quant.Recipe(None),
        lambda: quant.Recipe(quantized_dispatch="yes"),
        lambda: quant.Recipe(quantized_cotangents=1),
        lambda: quant.quantize(X, ROW).packed(),
        lambda: quantized_matmul(rhs=np.ones((2, 8, 8), np.float32)),
        lambda: quantized_matmul(preferred_element_type=jnp.float16),
        lambda: quant.Recipe("fp8"),
        lambda: matmul_by_recipe(quant.Fp8Row()),
        lambda: matmul_by_recipe(quantized_rhs=FOR_TRAINING.forward),
        lambda: matmul_by_recipe(dtype=np.float16),
        lambda: matmul_by_recipe(quantized_rhs=quant.QuantizedWeights(FOR_TRAINING.forward, X)),
        lambda: jax_ep.grouped_matmul(X, FOR_TRAINING, np.ones(2, np.int32)),
        lambda: quantized_matmul(preferred_element_type="fp8"),
    ],
    "UnavailableError": [
        lambda: jax.grad(lambda x: quant.quantize(x, quant.Fp8Row()).scales.sum())(X),
        gradient_of_quantized_weights,
        gradient_by_one_layout,
    ],
}
