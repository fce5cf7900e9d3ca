"""Quantized arrays against loop-written numpy, whose eight-bit rounding is that of ml_dtypes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
import tier
from absl.testing import absltest, parameterized
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from quantized import (
    EIGHT_BITS,
    assert_quantized,
    is_blocked,
    numpy_quantize,
    values_of,
)

import jax_ep
from jax_ep import quant
from jax_ep._src.quant import reference as quantize

FORMATS = (
    quant.Fp8Block128(),
    quant.Fp8Block128(scale_rounding="power_of_two"),
    quant.Fp8Row(),
    quant.Fp8Row(scale_rounding="power_of_two"),
    quant.Fp8Row(jnp.float8_e5m2),
)
SHAPES = ((1, 1), (3, 127), (5, 128), (2, 129), (4, 384), (130, 300))


def row_blocks(format, x):
    return (1, 128) if is_blocked(format) else (1, x.shape[-1])


def weight_blocks(format, w, transpose_rhs):
    if is_blocked(format):
        return 128, 128
    return (1, w.shape[-1]) if transpose_rhs else (w.shape[-2], 1)


@functools.cache
def quantizer(format, **options):
    return jax.jit(functools.partial(quant.quantize, format=format, **options))


def assert_quantized_by(quantize, got, message=""):
    """Bitwise, except that on GPUs XLA divides with an error of 2 units in the last place."""
    values, scales = quantize()
    if tier.ON_GPU:
        for ulps in (-2, -1, 1, 2):
            others = quantize(ulps=ulps)[0]
            same = testing.bits(np.asarray(got.values)) == testing.bits(others)
            values = np.where(same, others, values)
    assert_quantized(got, (values, scales), message)


class QuantizeTest(parameterized.TestCase):
    @parameterized.product(dtype=testing.ROW_DTYPES, format=FORMATS)
    def test_rows(self, format, dtype):
        for shape in SHAPES:
            x = np.clip(values_of(shape), -6e4, 6e4).astype(dtype)
            expected = numpy_quantize(x, format, row_blocks(format, x))
            assert_quantized(quantizer(format)(x), expected, shape)

    @parameterized.product(format=FORMATS, transpose_rhs=[False, True])
    def test_weights(self, format, transpose_rhs):
        for shape in ((1, 1), (128, 128), (129, 300), (256, 100)):
            w = values_of((2, *shape))
            got = quant.quantize_weights(w, format, transpose_rhs=transpose_rhs)
            expected = functools.partial(
                numpy_quantize, w, format, weight_blocks(format, w, transpose_rhs)
            )
            if is_blocked(format):
                assert_quantized(got, expected(), shape)
            else:
                assert_quantized_by(expected, got, shape)

    def test_every_value_between_two_eight_bit_values(self):
        """Values, midpoints, and their neighbors: the rounding is that of ml_dtypes, ties to even."""
        for dtype, largest in EIGHT_BITS.items():
            every = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
            every = np.sort(every[np.isfinite(every)])
            middles = (every[1:] + every[:-1]) / 2
            points = np.concatenate([every, middles])
            inf = np.float32(np.inf)
            points = np.concatenate([points, np.nextafter(points, inf), np.nextafter(points, -inf)])
            points = points[np.abs(points) <= largest]
            got = quant.quantize(points[None], quant.Fp8Row(dtype), scales=1)
            testing.assert_bitwise(got.values[0], points.astype(dtype))

    @parameterized.parameters(jnp.float8_e4m3fn, jnp.float8_e5m2)
    def test_casts_round_nothing(self, dtype):
        """XLA may remove a cast to eight bits and back; the values before it are those after it."""
        bits = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
        exact = np.sort(bits[np.isfinite(bits)])
        middles = (exact[1:] + exact[:-1]) / 2
        x = np.concatenate([exact, *(np.nextafter(middles, to) for to in (middles, -1e9, 1e9))])
        rounded = np.asarray(jax.jit(quantize.rounded, static_argnums=1)(x, dtype))
        testing.assert_bitwise(rounded, x.astype(dtype).astype(np.float32))

    @parameterized.parameters(*FORMATS)
    def test_the_rounding_of_bfloat16_stays(self, format):
        """XLA may remove a cast to it and back, if both are in one program."""
        x = values_of((3, 300))
        compute = lambda x: quant.quantize(x.astype(jnp.bfloat16), format)
        expected = quant.quantize(jnp.asarray(x, jnp.bfloat16), format)
        jax.tree.map(testing.assert_bitwise, jax.jit(compute)(x), expected)
        kept_by = "jax_ep.quantize.v1" if tier.ON_GPU else "reduce_precision"
        self.assertIn(kept_by, jax.jit(compute).lower(x).as_text())

    def test_zeros(self):
        """A block of zeros has a scale, too, so that nothing is divided by zero."""
        for format in FORMATS:
            got = quantizer(format)(np.zeros((3, 256), np.float32))
            self.assertTrue((np.asarray(got.scales) > 0).all())
            testing.assert_bitwise(
                quant.dequantize(got, jnp.float32), np.zeros((3, 256), np.float32)
            )

    def test_least_magnitude(self):
        """Below 1e-4 the scale no longer follows the values; above, it does."""
        x = np.full((1, 128), 1e-6, np.float32)
        scale = np.float32(1e-4) * np.float32(1 / 448)
        self.assertEqual(quant.quantize(x, quant.Fp8Block128()).scales[0, 0], scale)
        x[0, 5] = 2e-4
        scale = np.float32(2e-4) * np.float32(1 / 448)
        self.assertEqual(quant.quantize(x, quant.Fp8Block128()).scales[0, 0], scale)
        small = np.full((1, 128), 1e-20, np.float32)  # a gradient of this size keeps its bits
        got = quant.dequantize(quant.quantize(small, quant.Fp8Row(jnp.float8_e5m2)), jnp.float32)
        np.testing.assert_allclose(got, small, rtol=1e-6)

    @parameterized.parameters(*FORMATS)
    def test_cotangents_may_be_small(self, format):
        """A power of two is in the scales, and changes no value."""
        compute = quantizer(format.for_cotangents())
        x, power = values_of((16, 300)), np.float32(2.0**-80)
        small, expected = compute(x * power), compute(x)
        testing.assert_bitwise(small.values, expected.values)
        testing.assert_bitwise(np.asarray(small.scales) / power, expected.scales)

    @parameterized.parameters(*FORMATS)
    def test_the_least_scale_has_a_reciprocal(self, format):
        """Kernels and XLA may take numbers that are not normal for zeros."""
        least = format.for_cotangents()
        tiny = np.finfo(np.float32).tiny
        for amax in 0.0, 1e-45, tiny, least.min_amax:
            got = quantizer(least)(np.full((1, 128), amax, np.float32))
            scale = np.asarray(got.scales)
            self.assertTrue(((scale >= tiny) & (1 / scale >= tiny) & (1 / scale < np.inf)).all())
            error = np.abs(np.asarray(quant.dequantize(got, jnp.float32)) - np.float32(amax))
            self.assertLessEqual(error.max(), amax / 8 if amax == least.min_amax else tiny)

    @parameterized.product(bad=[np.nan, np.inf, -np.inf], format=FORMATS)
    def test_bad_values_make_their_block_nan(self, bad, format):
        x = values_of((4, 384))
        x[1, 130] = bad
        got = np.asarray(quant.dequantize(quantizer(format)(x), jnp.float32))
        expected = np.zeros((4, 384), bool)
        expected[1, 128:256] = True
        if not is_blocked(format):
            expected[1] = True
        np.testing.assert_array_equal(np.isnan(got), expected)
        static = quant.dequantize(quant.quantize(x, format, scales=2.0), jnp.float32)
        np.testing.assert_array_equal(np.argwhere(np.isnan(static)), [[1, 130]])

    @parameterized.parameters(*FORMATS)
    def test_round_trip(self, format):
        """The error is half a step: 2^-4 of a value, or of the least normal one, in E4M3."""
        x = values_of((64, 512))
        got = quantizer(format)(x)
        half_step = 2.0**-4 if format.dtype == jnp.float8_e4m3fn else 2.0**-3
        least_normal = float(jnp.finfo(format.dtype).smallest_normal)
        scales = np.repeat(np.asarray(got.scales), got.block_shape[1], 1)
        bound = half_step * np.maximum(np.abs(x), least_normal * scales) * (1 + 1e-6)
        error = np.abs(np.asarray(quant.dequantize(got, jnp.float32)) - x)
        self.assertTrue((error <= bound).all())
        # The bound is tight: a value just below the middle of a step comes close to it.
        self.assertGreater((error / bound).max(), 0.85)

    @parameterized.parameters(*(f for f in FORMATS if f.scale_rounding == "power_of_two"))
    def test_powers_of_two_scale_exactly(self, format):
        """With such scales bfloat16 holds every dequantized value."""
        got = quantizer(format)(values_of((16, 256)))
        exact = np.asarray(quant.dequantize(got, jnp.float32))
        rounded = np.asarray(quant.dequantize(got, jnp.bfloat16)).astype(np.float32)
        testing.assert_bitwise(rounded, exact)
        mantissas = np.frexp(np.asarray(got.scales))[0]
        np.testing.assert_array_equal(mantissas, np.full_like(mantissas, 0.5))

    def test_static_scales(self):
        x = np.array([[1, -3, 1000, 0.3]], np.float32)
        for scales in (2.0, np.float32(2), np.full((1, 1), 2, np.float32)):
            got = quant.quantize(x, quant.Fp8Row(), scales=scales)
            expected = np.clip(x / 2, -448, 448).astype(jnp.float8_e4m3fn)
            assert_quantized(got, (expected, np.full((1, 1), 2, np.float32)))
        per_block = np.array([[0.5], [4]], np.float32)
        got = quant.quantize(np.ones((2, 256)), quant.Fp8Block128(), scales=per_block)
        testing.assert_bitwise(got.scales, np.repeat(per_block, 2, 1))
        ones = np.ones((2, 256), np.float32)
        testing.assert_bitwise(quant.dequantize(got, jnp.float32), ones)


class QuantizedTest(parameterized.TestCase):
    @parameterized.parameters(*FORMATS)
    def test_is_a_pytree(self, format):
        got = quantizer(format)(values_of((4, 256)))
        leaves, structure = jax.tree.flatten(got)
        self.assertLen(leaves, 2)
        self.assertEqual(jax.tree.unflatten(structure, leaves).format, format)
        self.assertEqual((got.shape, got.ndim), ((4, 256), 2))
        self.assertEqual(hash(format), hash(got.format))

    def test_block_shape(self):
        w = np.ones((2, 300, 130), np.float32)
        blocks = lambda format: quant.quantize_weights(w, format).block_shape
        self.assertEqual(blocks(quant.Fp8Block128()), (1, 128, 128))
        self.assertEqual(blocks(quant.Fp8Row()), (1, 300, 1))
        rows = quant.quantize(w, quant.Fp8Block128())
        self.assertEqual(rows.block_shape, (1, 1, 128))
        self.assertEqual(quant.quantize(w, quant.Fp8Row()).block_shape, (1, 1, 130))

    @parameterized.parameters(*FORMATS)
    def test_transpose(self, format):
        """Blocks of 128 x 128 serve both directions; channels are those of the same result."""
        w = values_of((2, 256, 384))
        got = quant.quantize_weights(w, format).mT
        expected = quant.quantize_weights(np.swapaxes(w, 1, 2), format, transpose_rhs=True)
        assert_quantized(got, (expected.values, expected.scales))

    @parameterized.product(format=(quant.Fp8Block128(), quant.Fp8Row()), rows=(0, 1, 6, 8))
    def test_transposed_scales(self, format, rows):
        rng = np.random.default_rng(rows)
        x = quant.quantize(jnp.asarray(rng.standard_normal((2, rows, 300)), jnp.float32), format)
        got = np.asarray(jax.jit(quant.Quantized.transposed_scales)(x))
        scales = np.asarray(x.scales)
        self.assertEqual(got.shape, (2, scales.shape[-1], 4 * -(-rows // 4)))
        np.testing.assert_array_equal(got[..., :rows], scales.transpose(0, 2, 1))
        np.testing.assert_array_equal(got[..., rows:], 1)

    @parameterized.parameters(*FORMATS)
    def test_qwix(self, format):
        """The arrays themselves, in both directions, and qwix dequantizes them to the same values."""
        try:
            import qwix
        except ImportError:
            self.skipTest("qwix is not installed")
        for got in (
            quantizer(format)(values_of((4, 256))),
            quant.quantize_weights(values_of((2, 256, 384)), format),
        ):
            array = got.to_qwix()
            self.assertIs(array.qvalue, got.values)
            self.assertIs(array.scale, got.scales)
            self.assertEqual(array.scale_tile_shape, got.block_shape)
            testing.assert_bitwise(qwix.dequantize(array), quant.dequantize(got, jnp.float32))
            back = quant.Quantized.from_qwix(array, format)
            self.assertIs(back.values, got.values)
            self.assertIs(back.scales, got.scales)

    def test_qwix_quantizes_alike(self):
        """A QArray made by qwix, one scale per row, has the same scales and values."""
        try:
            import qwix
        except ImportError:
            self.skipTest("qwix is not installed")
        x = np.random.default_rng(0).standard_normal((8, 256)).astype(np.float32)
        theirs = qwix.quantize(x, "float8_e4m3fn", channelwise_axes=(0,))
        ours = quant.Quantized.from_qwix(theirs, quant.Fp8Row())
        expected = quant.quantize(x, quant.Fp8Row())
        np.testing.assert_allclose(ours.scales, expected.scales, rtol=1e-6)
        close = quant.dequantize(ours, jnp.float32), quant.dequantize(expected, jnp.float32)
        np.testing.assert_allclose(*close, rtol=0.13, atol=1e-2)


class TransformationsTest(parameterized.TestCase):
    @parameterized.parameters(*FORMATS)
    def test_eager_jit_and_vmap_agree(self, format):
        x = values_of((3, 5, 200))
        expected = numpy_quantize(x, format, row_blocks(format, x))
        assert_quantized(quant.quantize(x, format), expected, "eager")
        assert_quantized(quantizer(format)(x), expected, "jit")
        assert_quantized(jax.vmap(quantizer(format))(x), expected, "vmap")
        dequantized = quant.dequantize(quantizer(format)(x))
        mapped = jax.vmap(lambda x: quant.dequantize(quant.quantize(x, format)))(x)
        testing.assert_bitwise(mapped, dequantized)

    @parameterized.product(format=FORMATS, check_vma=[True, False])
    def test_shard_map(self, format, check_vma):
        x = values_of((4 * testing.NUM_DEVICES, 200))
        inside = testing.sharded(
            lambda x: quant.quantize(x, format), testing.expert_mesh(), check_vma=check_vma
        )
        assert_quantized(inside(x), numpy_quantize(x, format, row_blocks(format, x)))

    @parameterized.parameters(AxisType.Auto, AxisType.Explicit)
    def test_sharded_operands(self, axis_type):
        mesh = testing.mesh_of((testing.NUM_DEVICES,), ("expert",), axis_type=axis_type)
        x = values_of((4 * testing.NUM_DEVICES, 200))
        with jax.set_mesh(mesh):
            placed = jax.device_put(x, NamedSharding(mesh, P("expert")))
            for format in FORMATS:
                got = quantizer(format)(placed)
                assert_quantized(got, numpy_quantize(x, format, row_blocks(format, x)))
                self.assertEqual(got.scales.sharding.spec[0], "expert")

    def test_derivatives_are_refused(self):
        x = values_of((2, 128))
        w = quant.quantize(x, FORMATS[0])
        loss = lambda x: quant.dequantize(quant.quantize(x, FORMATS[0]), jnp.float32).sum()
        static = lambda scale: quant.quantize(x, FORMATS[0], scales=scale).scales.sum()
        scales = lambda s: quant.dequantize(quant.Quantized(w.values, s, w.format)).sum()
        for f, at in ((loss, x), (static, 1.0), (scales, w.scales)):
            for derivative in (
                jax.grad(f),
                jax.grad(jax.jit(f)),
                jax.grad(jax.checkpoint(f)),
                lambda at, f=f: jax.jvp(f, (at,), (jnp.ones_like(at),)),
            ):
                with self.assertRaisesRegex(jax_ep.UnavailableError, "stop_gradient"):
                    derivative(at)
        # Where nothing depends on it, it may stand in a differentiated function.
        frozen = lambda a, x: a * quant.dequantize(quant.quantize(x, FORMATS[0]), jnp.float32).sum()
        expected = np.asarray(frozen(1.0, x))
        np.testing.assert_allclose(jax.jit(jax.grad(frozen))(1.0, x), expected, rtol=1e-6)
        stopped = lambda x: loss(jax.lax.stop_gradient(x)) + x.sum()
        testing.assert_bitwise(jax.grad(stopped)(jnp.asarray(x)), np.ones_like(x))

    @parameterized.parameters(*FORMATS)
    def test_straight_through(self, format):
        x = values_of((2, 300))
        out, backward = jax.vjp(lambda x: quant.fake_quantize(x, format), x)
        expected = quant.dequantize(quant.quantize(x, format), jnp.float32)
        testing.assert_bitwise(out, expected)
        testing.assert_bitwise(jax.jit(lambda x: quant.fake_quantize(x, format))(x), expected)
        cotangent = jnp.asarray(values_of((2, 300), seed=1))
        testing.assert_bitwise(backward(cotangent)[0], cotangent)


class CheckpointTest(parameterized.TestCase):
    def test_deepseek_layout(self):
        """weight_scale_inv has a row and a column for each partial block, too."""
        w = np.random.default_rng(0).standard_normal((576, 200)).astype(np.float32)
        values, scales = numpy_quantize(w, quant.Fp8Block128(), (128, 128))
        self.assertEqual(scales.shape, (5, 2))
        loaded = quant.Quantized(jnp.asarray(values), jnp.asarray(scales), quant.Fp8Block128())
        expected = values.astype(np.float32)
        for i, j in itertools.product(range(576), range(200)):
            expected[i, j] *= scales[i // 128, j // 128]
        testing.assert_bitwise(quant.dequantize(loaded, jnp.float32), expected)

    @parameterized.parameters(
        lambda scales: scales.astype(jnp.float8_e8m0fnu),
        lambda scales: scales.astype(jnp.float8_e8m0fnu).view(np.uint8),
        lambda scales: scales.astype(jnp.bfloat16),
        lambda scales: scales.astype(np.float64),
    )
    def test_scales_of_other_dtypes_are_cast_as_the_error_says(self, stored):
        made = quant.quantize(values_of((4, 256)), quant.Fp8Block128("power_of_two"))
        scales = stored(np.asarray(made.scales))
        with self.assertRaises(jax_ep.DtypeError) as caught:
            quant.dequantize(dataclasses.replace(made, scales=scales))
        (advice,) = re.findall(r"scales\.\S+\)", str(caught.exception))
        testing.assert_bitwise(eval(advice, {"scales": scales, "jnp": jnp}), made.scales)

    def test_bytes_are_viewed_as_the_error_says(self):
        made = quant.quantize(values_of((4, 256)), quant.Fp8Row())
        values = np.asarray(made.values).view(np.uint8)
        with self.assertRaises(jax_ep.DtypeError) as caught:
            quant.dequantize(dataclasses.replace(made, values=values))
        (advice,) = re.findall(r"values\.\S+\)", str(caught.exception))
        testing.assert_bitwise(eval(advice, {"values": values, "jnp": jnp}), made.values)


if __name__ == "__main__":
    absltest.main()
