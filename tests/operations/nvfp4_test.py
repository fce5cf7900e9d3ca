"""NVFP4: against a loop in numpy, ml_dtypes and qwix; its scale per tensor under transformations and in transfers."""

from __future__ import annotations

import functools

import testing  # isort: skip

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized
from jax.sharding import PartitionSpec as P
from quantized import norm, values_of

import jax_ep
from jax_ep import quant

FORMAT = quant.NvFp4()
LARGEST, LARGEST_SCALE = np.float32(6), np.float32(448)
SIZES = np.array([8, 8], np.int32)


def numpy_tensor_scale(x):
    return np.abs(x).max() * np.float32(1 / (LARGEST_SCALE * LARGEST))


def numpy_quantize(x, tensor_scale):
    """Block by block; float32 values, float32 scales."""
    values = np.zeros(x.shape, np.float32)
    scales = np.zeros((len(x), -(-x.shape[1] // 16)), np.float32)
    tensor_scale = np.float32(tensor_scale)
    for i, j in np.ndindex(*scales.shape):
        block = x[i, 16 * j : 16 * j + 16].astype(np.float32)
        scale = np.abs(block).max() * (np.float32(1) / (LARGEST * tensor_scale))
        scale = np.clip(scale, np.float32(2**-9), LARGEST_SCALE).astype(ml_dtypes.float8_e4m3fn)
        scales[i, j] = scale
        scaled = block * (np.float32(1) / (scales[i, j] * tensor_scale))
        scaled = np.clip(scaled, -LARGEST, LARGEST).astype(ml_dtypes.float4_e2m1fn)
        values[i, 16 * j : 16 * j + 16] = scaled
    return values, scales


def numpy_dequantize(values, scales, tensor_scale):
    products = scales * np.float32(tensor_scale)
    return values * np.repeat(products, 16, 1)[:, : values.shape[1]]


def as_floats(rows):
    return np.asarray(rows.values, np.float32), np.asarray(rows.scales, np.float32)


class QuantizeTest(parameterized.TestCase):
    @parameterized.product(
        size=[96, 40, 1], dtype=[jnp.float32, jnp.bfloat16], tensor_scale=[None, 1.0, 2.0**-9]
    )
    def test_against_numpy(self, size, dtype, tensor_scale):
        """A given scale of a tensor may be too small: the largest blocks saturate."""
        x = np.asarray(values_of((7, size)).astype(dtype))
        got = jax.jit(lambda x: quant.quantize(x, FORMAT, tensor_scale=tensor_scale))(x)
        wide = x.astype(np.float32)
        scale = numpy_tensor_scale(wide) if tensor_scale is None else np.float32(tensor_scale)
        testing.assert_bitwise(got.tensor_scale, scale)
        self.assertEqual(
            (got.values.dtype, got.scales.dtype), (jnp.float4_e2m1fn, jnp.float8_e4m3fn)
        )
        values, scales = numpy_quantize(wide, scale)
        for found, expected in zip(as_floats(got), (values, scales), strict=True):
            np.testing.assert_array_equal(found, expected)
        found = quant.dequantize(got, jnp.float32)
        testing.assert_bitwise(found, numpy_dequantize(values, scales, scale))

    def test_error_of_normal_values(self):
        """Steps of E2M1 decide it, with scales within 1 / 16 of exact ones."""
        x = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
        error = norm(quant.fake_quantize(x, FORMAT), x)
        self.assertBetween(error, 0.05, 0.12)

    @parameterized.parameters(1.0, 2.0**-100, 2.0**110)
    def test_scales_at_their_limits(self, magnitude):
        """A NaN or an infinity makes its block NaN, but not the tensor; zeros and huge blocks stay finite."""
        x = np.zeros((6, 16), np.float32)
        x[:5, 0] = magnitude * np.array([448 * 6, 6, 6 * 2**-20, np.nan, np.inf], np.float32)
        got = quant.quantize(x, FORMAT)
        np.testing.assert_array_equal(got.tensor_scale, np.float32(magnitude))
        scales = np.asarray(got.scales, np.float64)[:, 0]
        np.testing.assert_array_equal(scales, [448, 1, 2**-9, np.nan, np.nan, 2**-9])
        found = np.asarray(quant.dequantize(got, jnp.float32))
        np.testing.assert_array_equal(
            found[[0, 1, 2, 5]], np.where(x == x[2, 0], 0, x)[[0, 1, 2, 5]]
        )
        self.assertTrue(np.isnan(found[3:5]).all())

    def test_only_zeros(self):
        for x in np.zeros((4, 32), np.float32), np.zeros((0, 32), np.float32):
            got = quant.quantize(x, FORMAT)
            self.assertGreater(float(got.tensor_scale), 0)
            np.testing.assert_array_equal(quant.dequantize(got, jnp.float32), x)

    def test_values_are_rounded_as_ml_dtypes_does(self):
        """All bfloat16 numbers whose block has the scale one."""
        numbers = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
        numbers = numbers[np.abs(numbers) <= LARGEST]
        x = np.zeros((-(-len(numbers) // 15), 16), np.float32)
        x[:, 0] = LARGEST
        x[:, 1:].flat[: len(numbers)] = numbers
        got = np.asarray(quant.quantize(x, FORMAT, tensor_scale=1.0).values).astype(np.float32)
        np.testing.assert_array_equal(got, x.astype(ml_dtypes.float4_e2m1fn).astype(np.float32))

    def test_qwix_has_the_same_values(self):
        """Its blocks have no scale of the tensor."""
        try:
            import qwix
        except ImportError:
            self.skipTest("qwix is not installed")
        x = np.random.default_rng(0).standard_normal((16, 96)).astype(np.float32)
        other = qwix.quantize(x, "nvfp4", channelwise_axes=(0,), tiled_axes={1: 16})
        got = quant.quantize(x, FORMAT, tensor_scale=1.0)
        for found, expected in zip(as_floats(got), (other.qvalue, other.scale), strict=True):
            np.testing.assert_array_equal(found, np.asarray(expected, np.float32))
        scaled = quant.quantize(x, FORMAT)
        back = scaled.to_qwix()
        found = np.asarray(back.qvalue, np.float32) * np.repeat(np.asarray(back.scale), 16, 1)
        np.testing.assert_array_equal(found, quant.dequantize(scaled, jnp.float32))

    def test_static_scales(self):
        x = np.full((2, 32), 12, np.float32)
        got = quant.quantize(x, FORMAT, scales=1.5, tensor_scale=2.0)
        np.testing.assert_array_equal(got.values.astype(jnp.float32), np.full((2, 32), 4))
        self.assertEqual(float(quant.quantize(x, FORMAT, scales=1.5).tensor_scale), 1)

    def test_a_matrix_has_a_scale(self):
        w = values_of((3, 32, 48))
        got = quant.quantize_weights(w, FORMAT)
        self.assertEqual((got.scales.shape, got.tensor_scale.shape), ((3, 2, 48), (3,)))
        for g in range(3):
            values, scales = numpy_quantize(w[g].T, numpy_tensor_scale(w[g]))
            np.testing.assert_array_equal(got.values[g].astype(jnp.float32), values.T)
            np.testing.assert_array_equal(got.scales[g].astype(jnp.float32), scales.T)
        testing.assert_bitwise(quant.dequantize(got.mT), np.asarray(quant.dequantize(got).mT))


class TransformationsTest(absltest.TestCase):
    def test_vmap(self):
        """Each element of a batch is a tensor, and shares a scale that is given."""
        x = values_of((5, 4, 32))
        for scale in None, 0.5:
            quantize = lambda x, scale=scale: quant.quantize(x, FORMAT, tensor_scale=scale)
            got = jax.jit(jax.vmap(quantize))(x)
            floats = jax.vmap(quant.dequantize)(got)
            for i in range(5):
                testing.assert_bitwise(floats[i], np.asarray(quant.dequantize(quantize(x[i]))))
        scales = np.float32([1, 2, 4, 8, 16])
        quantize = lambda x, scale: quant.quantize(x, FORMAT, tensor_scale=scale)
        got = jax.vmap(quantize, (None, 0))(x[0], scales)
        for i, scale in enumerate(scales):
            one = quantize(x[0], scale)
            testing.assert_bitwise(quant.dequantize(got)[i], np.asarray(quant.dequantize(one)))

    def test_no_derivative(self):
        x = np.ones((2, 16), np.float32)
        for of in (
            lambda x: quant.quantize(x, FORMAT),
            lambda x: quant.quantize(jnp.ones((2, 16)), FORMAT, tensor_scale=x[0, 0]),
        ):
            with self.assertRaisesRegex(jax_ep.UnavailableError, "it has no derivative"):
                jax.grad(lambda x, of=of: of(x).tensor_scale)(x)

    def test_bits(self):
        from jax_ep._src.quant.quantized import as_bits, from_bits

        rows = quant.quantize(values_of((4, 32)), FORMAT)
        bits = as_bits(rows)
        self.assertEqual(
            [leaf.dtype for leaf in jax.tree.leaves(bits)], ["uint4", "uint8", "uint32"]
        )
        testing.assert_bitwise(
            quant.dequantize(from_bits(bits)), np.asarray(quant.dequantize(rows))
        )

    def test_export(self):
        """Programs that take and return quantized rows; formats that derive from others, too."""
        for format in FORMAT, quant.MxFp8():
            rows = quant.quantize(values_of((4, 32)), format)
            exported = jax.export.export(jax.jit(lambda rows: rows))(rows)
            again = jax.export.deserialize(exported.serialize())
            self.assertEqual(again.in_tree, exported.in_tree)
            testing.assert_bitwise(
                quant.dequantize(again.call(rows)), np.asarray(quant.dequantize(rows))
            )

    def test_packed(self):
        packed = np.arange(256, dtype=np.uint8).reshape(8, 32)
        scales = np.full((8, 4), 0x38, np.uint8)  # one
        got = quant.Quantized.from_packed(packed, scales, FORMAT, jnp.float32(2))
        expected = quant.Quantized.from_packed(
            packed, np.full((8, 2), 128, np.uint8), quant.MxFp4()
        )
        testing.assert_bitwise(quant.dequantize(got), np.asarray(quant.dequantize(expected)))
        np.testing.assert_array_equal(got.packed(), packed)


class UseTest(absltest.TestCase):
    def test_matmul(self):
        """The scales of tensors multiply those of blocks, in float32."""
        lhs = quant.quantize(values_of((16, 64)), FORMAT)
        rhs = quant.quantize_weights(values_of((2, 64, 24), seed=1), FORMAT)
        out = jax_ep.grouped_matmul(lhs, rhs, SIZES, preferred_element_type=jnp.float32)
        floats = [np.asarray(quant.dequantize(x, jnp.float32), np.float64) for x in (lhs, rhs)]
        exact = np.concatenate([floats[0][:8] @ floats[1][0], floats[0][8:] @ floats[1][1]])
        size = np.concatenate(
            [abs(floats[0][:8]) @ abs(floats[1][0]), abs(floats[0][8:]) @ abs(floats[1][1])]
        )
        testing.assert_sums(out, exact, size, 64)

    def test_ranks_need_one_scale(self):
        """JAX knows which values differ between ranks."""
        ids = np.zeros((8 * testing.NUM_DEVICES, 1), np.int32)
        x = np.ones((len(ids), 32), np.float32)
        send = functools.partial(
            jax_ep.dispatch, num_experts=testing.NUM_DEVICES, axis_name="expert"
        )

        def again(rows, ids, weights):
            return jax_ep.redispatch(rows, send(rows.values.astype(jnp.float32), ids, weights).plan)

        for call in send, again:
            rows_of = lambda x, ids, call=call: (
                call(quant.quantize(x, FORMAT), ids, None).rows.values
            )
            with self.assertRaisesRegex(jax_ep.ArgumentError, "tensor_scale that differs between"):
                testing.sharded(rows_of, testing.expert_mesh())(x, ids)

    def test_layers_do_not_take_it(self):
        for use in quant.Recipe, quant.WeightsOnly:
            with self.assertRaisesRegex(jax_ep.ArgumentError, "has a scale per tensor, of which"):
                use(FORMAT)
        w = quant.quantize_weights(np.ones((2, 32, 32), np.float32), FORMAT)
        with self.assertRaisesRegex(jax_ep.ArgumentError, "has a scale per tensor, of which"):
            quant.experts_from_checkpoint(w, w)

    def test_scales_of_tensors_are_checked(self):
        x = np.ones((4, 32), np.float32)
        rows = quant.quantize(x, FORMAT)
        for scale in None, np.int32(1), np.ones(4, np.float32), 1.0:
            with self.assertRaisesRegex(jax_ep.DtypeError, "tensor_scale is .*; expected float32"):
                quant.dequantize(quant.Quantized(rows.values, rows.scales, FORMAT, scale))
        with self.assertRaisesRegex(jax_ep.DtypeError, "tensor_scale is of dtype int32 with"):
            quant.quantize(x, FORMAT, tensor_scale=np.int32(1))
        with self.assertRaisesRegex(jax_ep.ArgumentError, "tensor_scale is given with the format"):
            quant.quantize(x, quant.MxFp4(), tensor_scale=1.0)

    def test_rows_are_sent(self):
        """Quantized by one scale before dispatch or after it: the same rows."""
        ranks = testing.NUM_DEVICES
        rng = np.random.default_rng(0)
        x = rng.standard_normal((8 * ranks, 64)).astype(np.float32)
        ids = rng.integers(-1, 2 * ranks, (8 * ranks, 2)).astype(np.int32)

        def scale_of(x):
            return jax.lax.pmax(jnp.abs(x).max(), "expert") / (448 * 6)

        def both(x, ids):
            send = lambda rows: jax_ep.dispatch(
                rows, ids, None, num_experts=2 * ranks, axis_name="expert"
            )
            quantize = lambda rows: quant.quantize(rows, FORMAT, tensor_scale=scale_of(x))
            sent, plain = send(quantize(x)), send(x)
            again = jax_ep.redispatch(quantize(x), sent.plan).rows
            rows = sent.rows, again, quantize(plain.rows)
            return tuple(quant.dequantize(row, jnp.float32) for row in rows)

        mapped = jax.shard_map(
            both, mesh=testing.expert_mesh(), in_specs=P("expert"), out_specs=P("expert")
        )
        sent, again, expected = jax.jit(mapped)(x, ids)
        testing.assert_bitwise(sent, np.asarray(expected))
        testing.assert_bitwise(again, np.asarray(expected))


if __name__ == "__main__":
    absltest.main()
