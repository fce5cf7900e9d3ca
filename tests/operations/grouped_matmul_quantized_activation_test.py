"""The quantized grouped matmul with a gated activation against numpy in float64; and where layers use it."""

from __future__ import annotations

import functools
import unittest.mock

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
import programs
import tier
from absl.testing import absltest, parameterized
from quantized import TENSOR_CORE_ERROR, exact

import jax_ep
from jax_ep import quant
from jax_ep._src.matmul.grouped_matmul_quantized_activation import bind_quantized_activation
from jax_ep._src.matmul.params import GroupedMatmulActivationParams
from jax_ep._src.mlp import quantized_mlp

BLOCK, POWER = quant.Fp8Block128(), quant.Fp8Block128("power_of_two")
K, F = 208, 256
SIZES = np.array([20, 0, 17, 8], np.int32)
M, END = 48, 45


def problem(format):
    """Quantized rows, [G, 2F, K] and row weights; the tails are NaN."""
    rng = np.random.default_rng(0)
    rows = testing.random_values(rng, (M, K))
    weights = rng.normal(size=M).astype(np.float32)
    rows[END:] = weights[END:] = np.nan
    matrices = testing.random_values(rng, (len(SIZES), 2 * F, K)) / 16
    return (
        quant.quantize(rows, format),
        quant.quantize_weights(matrices, format, transpose_rhs=True),
        weights,
    )


@functools.cache
def fused(activation, keep):
    params = GroupedMatmulActivationParams(activation, 0, None)
    return jax.jit(
        functools.partial(bind_quantized_activation, params=params, keep_pre_activation=keep)
    )


def pre_activations(rows, matrices):
    """In float64, and the sums of magnitudes."""
    group = np.repeat(np.arange(len(SIZES)), SIZES)
    products = exact(rows)[:END, None] * exact(matrices)[group]
    return products.sum(2), np.abs(products).sum(2)


def activations(activation, pre_activation):
    gate, up = np.split(pre_activation, 2, axis=1)
    argument = gate if activation == "swiglu" else 1.5957691216057308 * (gate + 0.044715 * gate**3)
    return gate / (1 + np.exp(-np.maximum(argument, -100))) * up


class QuantizedActivationTest(parameterized.TestCase):
    @parameterized.product(
        format=[BLOCK, POWER],
        activation=["swiglu", "geglu"],
        has_weights=[False, True],
        keep=[False, True],
    )
    def test_agrees_with_numpy(self, format, activation, has_weights, keep):
        rows, matrices, weights = problem(format)
        given = weights if has_weights else None
        out, kept = fused(activation, keep)(rows, matrices, SIZES, given)
        pre_activation, magnitudes = pre_activations(rows, matrices)
        sum_error = (TENSOR_CORE_ERROR if tier.ON_GPU else 2**-20) * magnitudes
        if keep:
            self.assertEqual(kept.dtype, jnp.bfloat16)
            error = np.abs(np.asarray(kept, np.float64)[:END] - pre_activation)
            self.assertTrue((error <= 1.01 * 2**-8 * np.abs(pre_activation) + sum_error).all())
        else:
            self.assertIsNone(kept)
        expected = activations(activation, pre_activation)
        gate, up = np.split(np.abs(pre_activation), 2, axis=1)
        gate_error, up_error = np.split(sum_error, 2, axis=1)
        errors = 1.13 * gate_error * (up + up_error) + gate * up_error
        weight = weights[:END, None] if has_weights else np.ones(1)
        expected, errors = expected * weight, errors * np.abs(weight)
        errors = errors + 2**-17 * np.abs(expected)
        scales = np.asarray(out.scales, np.float64)[:END]
        blocks = lambda a: np.abs(a).reshape(END, F // 128, 128).max(2)
        for sign in -1, 1:  # between the scales of the smallest and the largest values that fit
            bound = np.maximum(blocks(expected) + sign * blocks(errors), 1e-4) / 448
            if format.scale_rounding == "power_of_two":
                bound = 2 ** np.ceil(np.log2(bound * (1 + sign * 1e-9)))
            self.assertTrue((sign * (bound * (1 + sign * 1e-6) - scales) >= 0).all())
        step = np.repeat(scales, 128, axis=1) * 2**-10
        rounding = 1.001 * np.maximum(step, np.abs(expected) * 2**-4)
        found = exact(quant.Quantized(out.values[:END], out.scales[:END], format))
        tolerance = rounding + errors + np.repeat(blocks(errors), 128, axis=1)
        self.assertLessEqual(np.max(np.abs(found - expected) / tolerance), 1)

    def test_values_are_those_of_quantize(self):
        rows, matrices, weights = problem(BLOCK)
        out, kept = fused("swiglu", True)(rows, matrices, SIZES, weights)
        other = jax_ep.grouped_matmul(
            rows, matrices, SIZES, transpose_rhs=True, preferred_element_type=jnp.float32
        )
        testing.assert_bitwise(kept[:END], other[:END].astype(jnp.bfloat16))
        gate, up = jnp.split(other, 2, axis=1)
        expected = quant.quantize(jax.nn.silu(gate) * up * weights[:, None], BLOCK)
        np.testing.assert_allclose(out.scales[:END], expected.scales[:END], rtol=1e-5)
        same = np.asarray(out.values)[:END].view(np.uint8) == np.asarray(expected.values)[
            :END
        ].view(np.uint8)
        self.assertGreater(same.mean(), 0.999)  # the others are between two eight-bit values

    def test_a_nan_makes_the_blocks_of_its_row_nan(self):
        rows, matrices, weights = problem(BLOCK)
        values = rows.values.at[5, 7].set(jnp.nan)
        out, _ = fused("swiglu", False)(
            quant.Quantized(values, rows.scales, BLOCK), matrices, SIZES, weights
        )
        is_nan = np.isnan(np.asarray(out.scales))[:END]
        np.testing.assert_array_equal(
            is_nan, (np.arange(END) == 5)[:, None] & np.ones(F // 128, bool)
        )
        np.testing.assert_array_equal(
            np.isnan(np.asarray(out.values, np.float32))[:END], np.repeat(is_nan, 128, axis=1)
        )


# ---- layers


RECIPE = quant.Recipe()


def mlp_arguments(f=F):
    rng = np.random.default_rng(1)
    normal = lambda *shape: rng.normal(size=shape)
    return (
        jnp.asarray(normal(M, 144), jnp.bfloat16),
        jnp.asarray(normal(4, 144, 2, f) / 12, jnp.bfloat16),
        jnp.asarray(normal(4, f, 144) / f**0.5, jnp.bfloat16),
        jnp.asarray(rng.random(M), jnp.float32),
    )


def mlp(rows, up, down, weights):
    return jax_ep.grouped_mlp(
        rows, up, down, SIZES, weights, activation="swiglu", quantization=RECIPE
    )


def with_gradients(function, *arguments):
    y, pull_back = jax.vjp(function, *arguments)
    return y, *pull_back(jnp.ones_like(y))


class LayerTest(parameterized.TestCase):
    def test_with_and_without_it_are_near(self):
        arguments = mlp_arguments()
        found = jax.jit(functools.partial(with_gradients, mlp))(*arguments)
        with unittest.mock.patch.object(
            quantized_mlp, "has_quantized_activation", lambda *_: False
        ):
            expected = jax.jit(functools.partial(with_gradients, mlp))(*arguments)
        for a, b in zip(found, expected, strict=True):
            a, b = (np.asarray(x, np.float64) for x in (a, b))
            self.assertLess(np.linalg.norm(a - b) / np.linalg.norm(b), 2e-2)

    def test_the_backward_pass_changes_no_bit(self):
        arguments = mlp_arguments()
        y = jax.jit(mlp)(*arguments)
        for function in mlp, jax.checkpoint(mlp):
            again = jax.jit(functools.partial(with_gradients, function))(*arguments)
            testing.assert_bitwise(again[0], y)

    @tier.only_on_cpu
    @parameterized.parameters((256, 1), (192, 0))
    def test_gate_and_up_are_whole_blocks(self, f, count):
        program = programs.lower_for_cuda(mlp, *mlp_arguments(f))
        self.assertEqual(program.targets.get("grouped_matmul_quantized_activation", 0), count)
        self.assertEqual(program.targets["grouped_matmul_quantized"], 2 - count)

    @tier.only_on_cpu
    def test_on_other_gpus_a_matmul_and_an_activation(self):
        other_gpu = unittest.mock.patch.object(
            jax_ep._src.core.runtime, "compute_capabilities", lambda: {"8.0"}
        )
        with other_gpu, programs.fallback_warnings() as messages:
            program = programs.lower_for_cuda(mlp, *mlp_arguments())
        self.assertLen(messages, 1)  # one reason
        self.assertIn("runs as a matmul and an activation", messages[0])
        self.assertEqual(
            program.targets, {"quantize": 1, "quantize_weights": 2, "grouped_matmul": 2}
        )


if __name__ == "__main__":
    absltest.main()
