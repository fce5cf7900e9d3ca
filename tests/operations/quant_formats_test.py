"""Properties of formats, and a format that the library does not know."""

from __future__ import annotations

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from programs import fallback_warnings, lower_for_cuda, struct
from quantized import Mxfp8, norm, numpy_quantize

import jax_ep
from jax_ep import quant

BLOCKS, ROWS = quant.Fp8Block128(), quant.Fp8Row(jnp.float8_e5m2)
SIZES = np.array([8, 8], np.int32)


class PropertiesTest(parameterized.TestCase):
    def test_what_shares_a_scale(self):
        self.assertEqual((BLOCKS.block, BLOCKS.matrix_block), (128, (128, 128)))
        self.assertEqual((ROWS.block, ROWS.matrix_block), (None, (1, None)))
        self.assertEqual((BLOCKS.is_blocked, ROWS.is_blocked), (True, False))
        self.assertEqual((BLOCKS.has_square_blocks, ROWS.has_square_blocks), (True, False))
        self.assertEqual({BLOCKS.scale_dtype, ROWS.scale_dtype}, {jnp.dtype(jnp.float32)})

    def test_formats_of_a_recipe(self):
        self.assertEqual((BLOCKS.min_amax, ROWS.min_amax), (1e-4, 1e-30))
        recipe = quant.Recipe(quant.Fp8Block128("power_of_two", min_amax=1e-8))
        self.assertEqual(recipe.weights, quant.Fp8Block128("power_of_two"))
        self.assertEqual(recipe.cotangents.scale_rounding, "power_of_two")
        self.assertEqual(quant.Recipe(quant.Fp8Row(), ROWS).weights, quant.Fp8Row())
        for format in BLOCKS, ROWS:
            cotangents = quant.Recipe(format).cotangents
            self.assertEqual(cotangents, format.for_cotangents())
            self.assertEqual(cotangents.dtype, format.dtype)
            self.assertEqual(quant.Recipe(format, cotangents).cotangents, cotangents)

    @parameterized.parameters(0, -1.0, 1e-38, np.inf, np.nan, "1e-4", None)
    def test_a_least_magnitude_without_a_scale(self, min_amax):
        for format in quant.Fp8Block128, quant.Fp8Row:
            with self.assertRaisesRegex(jax_ep.ArgumentError, "min_amax=.*expected a finite"):
                format(min_amax=min_amax)

    def test_weights_may_have_had_another_least_magnitude(self):
        """Their values and scales mean the same."""
        x, w = np.ones((16, 128), np.float32), np.ones((2, 128, 128), np.float32)
        call = lambda recipe, quantized: jax_ep.grouped_matmul(
            x, w, SIZES, quantization=recipe, quantized_rhs=quantized
        )
        quantized = quant.quantize_weights(w, quant.Fp8Block128(min_amax=1e-8))
        found = call(quant.Recipe(), quant.QuantizedWeights(quantized.mT))
        testing.assert_bitwise(found, call(quant.Recipe(), None))
        with self.assertRaisesRegex(jax_ep.ArgumentError, "by the recipe"):
            call(quant.Recipe(quant.Fp8Block128("power_of_two")), quant.QuantizedWeights(quantized))

    def test_the_epilogue_makes_scales_by_the_default(self):
        """With another least magnitude, activations are quantized beside it."""
        operands = struct((16, 128), jnp.bfloat16), struct((2, 128, 2, 128)), struct((2, 128, 128))
        for format, targets in (
            (BLOCKS, {"grouped_matmul_quantized_activation": 1, "grouped_matmul_quantized": 1}),
            (quant.Fp8Block128(min_amax=1e-8), {"grouped_matmul_quantized": 2}),
        ):
            options = dict(quantization=quant.Recipe(format))
            call = lambda *given, options=options: jax_ep.grouped_mlp(*given, SIZES, **options)
            found = lower_for_cuda(call, *operands).targets
            found = {name: count for name, count in found.items() if "matmul" in name}
            self.assertEqual(found, targets)


class AnotherFormatTest(parameterized.TestCase):
    """Formats without kernels, of which the library does not know one: nothing but its class is new."""

    def test_rows(self):
        x = np.random.default_rng(0).normal(size=(16, 80)).astype(np.float32)
        got = quant.quantize(x, Mxfp8())
        self.assertEqual((got.scales.dtype, got.block_shape), (jnp.float8_e8m0fnu, (1, 32)))
        values, scales = numpy_quantize(x, Mxfp8(), (1, 32))
        testing.assert_bitwise(got.values, values)
        testing.assert_bitwise(got.scales.astype(jnp.float32), scales)
        expected = values.astype(np.float32) * np.repeat(scales, 32, 1)[:, :80]
        testing.assert_bitwise(quant.dequantize(got, jnp.float32), expected)

    @parameterized.parameters((Mxfp8(), 0.06), (quant.MxFp8(), 0.06), (quant.MxFp4(), 0.3))
    def test_a_matmul_by_a_recipe(self, format, most):
        rng = np.random.default_rng(0)
        x, w = (rng.normal(size=size).astype(np.float32) for size in ((16, 96), (2, 96, 64)))

        def gradients(recipe):
            call = lambda x, w: jax_ep.grouped_matmul(x, w, SIZES, quantization=recipe)
            return jax.jit(jax.grad(lambda *given: (call(*given) ** 2).sum(), (0, 1)))(x, w)

        recipe = quant.Recipe(format)
        for result, expected in zip(gradients(recipe), gradients(None), strict=True):
            self.assertBetween(norm(result, expected), 0.01, most)
        layouts = quant.quantize_for_training(w, recipe)
        self.assertEqual(layouts.forward.scales.shape, (2, 64, 3))
        self.assertEqual(layouts.backward.scales.shape, (2, 96, 2))

    @parameterized.parameters(Mxfp8(), quant.MxFp8())
    def test_kernels_do_not_take_it(self, format):
        recipe = quant.Recipe(format)
        call = lambda x, w: jax_ep.grouped_matmul(x, w, SIZES, quantization=recipe)
        with fallback_warnings() as messages:
            program = lower_for_cuda(call, struct((16, 96), jnp.bfloat16), struct((2, 96, 64)))
        self.assertEqual(set(program.targets), {"grouped_matmul"})
        name = type(format).__name__
        self.assertRegex(" ".join(messages), f"no kernel quantizes to {name}.*no kernel mult")


if __name__ == "__main__":
    absltest.main()
