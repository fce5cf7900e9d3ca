"""MXFP8 and MXFP4: against loops in numpy, ml_dtypes, qwix and bytes of gpt-oss; through dispatch and a recipe."""

from __future__ import annotations

import testing  # isort: skip

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized
from jax.sharding import PartitionSpec as P
from quantized import LARGEST, exact, numpy_quantize, values_of

import jax_ep
from jax_ep import quant

FORMATS = quant.MxFp8(), quant.MxFp8(jnp.float8_e5m2), quant.MxFp4()
SIZES = np.array([8, 8], np.int32)


class QuantizeTest(parameterized.TestCase):
    @parameterized.product(format=FORMATS, size=[96, 80, 1], dtype=[jnp.float32, jnp.bfloat16])
    def test_against_numpy(self, format, size, dtype):
        x = np.asarray(values_of((7, size)).astype(dtype))
        got = jax.jit(lambda x: quant.quantize(x, format))(x)
        values, scales = numpy_quantize(x, format, (1, 32))
        self.assertEqual((got.values.dtype, got.scales.dtype), (format.dtype, jnp.float8_e8m0fnu))
        np.testing.assert_array_equal(np.asarray(got.scales, np.float64), scales)
        np.testing.assert_array_equal(np.asarray(got.values, np.float32), values.astype(np.float32))
        found = quant.dequantize(got, jnp.float32)
        testing.assert_bitwise(found, exact(got).astype(np.float32))

    @parameterized.parameters(*FORMATS)
    def test_scales_at_their_limits(self, format):
        """The largest value of a block keeps its scale, the next number doubles it; zeros, huge values and NaN."""
        largest = np.float32(LARGEST[format.dtype])
        above = np.nextafter(largest, np.float32(np.inf))
        x = np.zeros((6, 32), np.float32)
        x[:5, 0] = largest, above, 2.0**-140, 2.0**127, np.nan
        got = quant.quantize(x, format)
        scales = np.asarray(got.scales, np.float64)[:, 0]
        np.testing.assert_array_equal(scales[[0, 1, 2, 5]], [1, 2, 2.0**-125, 2.0**-125])
        self.assertEqual(float(got.values[0, 0]), largest)
        found = np.asarray(quant.dequantize(got, jnp.float32))
        self.assertTrue(np.isfinite(found[:4]).all() and np.isnan(found[4]).all())
        self.assertFalse(found[5].any())

    @parameterized.parameters(*FORMATS)
    def test_values_are_rounded_as_ml_dtypes_does(self, format):
        """All bfloat16 numbers whose block has the scale one."""
        numbers = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
        largest = LARGEST[format.dtype]
        numbers = numbers[np.abs(numbers) <= largest]
        x = np.zeros((-(-len(numbers) // 31), 32), np.float32)
        x[:, 0] = largest
        x[:, 1:].flat[: len(numbers)] = numbers
        got = np.asarray(quant.quantize(x, format).values).astype(np.float32)
        np.testing.assert_array_equal(got, x.astype(format.dtype).astype(np.float32))

    @parameterized.parameters(("mxfp8", quant.MxFp8()), ("mxfp4", quant.MxFp4()))
    def test_qwix_has_the_same_values(self, qtype, format):
        try:
            import qwix
        except ImportError:
            self.skipTest("qwix is not installed")
        x = np.random.default_rng(0).standard_normal((16, 96)).astype(np.float32)
        other = qwix.quantize(x, qtype, channelwise_axes=(0,), tiled_axes={1: 32})
        got = quant.quantize(x, format)
        np.testing.assert_array_equal(np.asarray(got.scales, np.float32), np.asarray(other.scale))
        np.testing.assert_array_equal(
            np.asarray(got.values, np.float32), np.asarray(other.qvalue, np.float32)
        )


class PackedTest(absltest.TestCase):
    def test_bytes_of_all_pairs(self):
        """As in gpt-oss's files: the first of two values is in the lower bits."""
        packed = np.arange(256, dtype=np.uint8).reshape(8, 32)
        scales = np.full((8, 2), 127, np.uint8)
        got = quant.Quantized.from_packed(packed, scales, quant.MxFp4())
        table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
        expected = np.stack((table[packed & 15], table[packed >> 4]), -1).reshape(8, 64)
        np.testing.assert_array_equal(np.asarray(got.values, np.float64), expected)
        self.assertTrue((np.asarray(got.scales, np.float32) == 1).all())
        np.testing.assert_array_equal(got.packed(), packed)

    def test_a_checkpoint_of_gpt_oss(self):
        """jax_ep.checkpoints makes the same of blocks and scales."""
        from jax_ep._src.checkpoints.dequantize import from_mxfp4

        rng = np.random.default_rng(0)
        blocks = rng.integers(0, 256, (4, 6, 3, 16), np.uint8)
        scales = rng.integers(110, 140, (4, 6, 3), np.uint8)
        joined = blocks.reshape(4, 6, 48)
        got = quant.Quantized.from_packed(joined, scales, quant.MxFp4())
        testing.assert_bitwise(
            quant.dequantize(got), np.asarray(from_mxfp4(blocks, scales)).reshape(4, 6, 96)
        )

    def test_other_formats_are_bytes_already(self):
        with self.assertRaisesRegex(jax_ep.DtypeError, "values are float8_e4m3fn; expected"):
            quant.quantize(np.ones((2, 32), np.float32), quant.MxFp8()).packed()
        values, scales = np.zeros((2, 32), np.uint8), np.zeros((2, 1), np.uint8)
        with self.assertRaisesRegex(jax_ep.DtypeError, "values are float8_e4m3fn; expected"):
            quant.Quantized.from_packed(values, scales, quant.MxFp8())


class UseTest(parameterized.TestCase):
    @parameterized.parameters(*FORMATS)
    def test_rows_are_sent(self, format):
        """Quantized before dispatch or after it: the same rows."""
        ranks = testing.NUM_DEVICES
        rng = np.random.default_rng(0)
        x = rng.standard_normal((8 * ranks, 64)).astype(np.float32)
        ids = rng.integers(-1, 2 * ranks, (8 * ranks, 2)).astype(np.int32)

        def both(x, ids):
            send = lambda rows: jax_ep.dispatch(
                rows, ids, None, num_experts=2 * ranks, axis_name="expert"
            )
            sent, plain = send(quant.quantize(x, format)), send(x)
            again = jax_ep.redispatch(quant.quantize(x, format), sent.plan).rows
            floats = [quant.dequantize(rows, jnp.float32) for rows in (sent.rows, again)]
            return *floats, quant.fake_quantize(plain.rows, format)

        mapped = jax.shard_map(
            both, mesh=testing.expert_mesh(), in_specs=P("expert"), out_specs=P("expert")
        )
        sent, again, expected = jax.jit(mapped)(x, ids)
        testing.assert_bitwise(sent, np.asarray(expected))
        testing.assert_bitwise(again, np.asarray(expected))

    def test_checkpoint_keeps_every_bit(self):
        """Integers of four bits are kept, which jax.checkpoint does not round."""
        recipe = quant.Recipe(quant.MxFp4())
        x, w = np.ones((16, 96), np.float32), np.linspace(-3, 3, 2 * 96 * 64, dtype=np.float32)

        def gradient(wrap):
            call = lambda x, w: jax_ep.grouped_matmul(x, w, SIZES, quantization=recipe)
            w_up = w.reshape(2, 96, 64)
            return jax.jit(jax.grad(lambda x: (wrap(call)(x, w_up) ** 2).sum()))(x)

        kept = lambda f: jax.checkpoint(f, policy=jax.checkpoint_policies.everything_saveable)
        testing.assert_bitwise(gradient(kept), np.asarray(gradient(lambda f: f)))

    def test_dtypes(self):
        for dtype in jnp.bfloat16, jnp.int8, jnp.float4_e2m1fn, "fp8":
            with self.assertRaisesRegex(jax_ep.DtypeError, "expected float8_e4m3fn or float8_e5m2"):
                quant.MxFp8(dtype)


if __name__ == "__main__":
    absltest.main()
