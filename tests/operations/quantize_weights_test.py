"""Matrices in blocks of 128 x 128, in the layouts of both passes, against loop-written numpy."""

from __future__ import annotations

import functools

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from quantized import assert_quantized, numpy_quantize, values_of

import jax_ep
from jax_ep import quant

RECIPES = (quant.Recipe(), quant.Recipe(quant.Fp8Block128("power_of_two")))
# One value; whole blocks; blocks that are partial along one axis or both, with aligned rows or not.
SHAPES = ((1, 1), (128, 256), (272, 144), (129, 300), (130, 7), (16, 384))


def weights_of(shape, dtype=np.float32, seed=0):
    """Matrices with blocks of zeros, and of values below the least magnitude."""
    w = np.clip(values_of(shape, seed=seed), -6e4, 6e4)
    w[0, ..., :128, :128] = 0
    w[-1, ..., 128:, :128] *= 1e-9
    return w.astype(dtype)


@functools.cache
def for_training(recipe, **options):
    return jax.jit(functools.partial(quant.quantize_for_training, quantization=recipe, **options))


def expected_layouts(w, recipe):
    """(values, scales) of w [..., K, N] in both layouts."""
    values, scales = numpy_quantize(w, recipe.weights, (128, 128))
    return (values.swapaxes(-1, -2), scales.swapaxes(-1, -2)), (values, scales)


def assert_layouts(got, w, recipe, message=""):
    forward, backward = expected_layouts(w, recipe)
    assert_quantized(got.forward, forward, f"{message} forward")
    assert_quantized(got.backward, backward, f"{message} backward")


class LayoutsTest(parameterized.TestCase):
    @parameterized.product(dtype=testing.ROW_DTYPES, recipe=RECIPES)
    def test_against_numpy(self, recipe, dtype):
        for seed, shape in enumerate(SHAPES):
            w = weights_of((3, *shape), dtype, seed)
            assert_layouts(for_training(recipe)(w), w, recipe, shape)
            transposed = for_training(recipe, transpose_rhs=True)(w.swapaxes(1, 2))
            assert_layouts(transposed, w, recipe, f"{shape} transposed")
            assert_quantized(
                quant.quantize_weights(w, recipe.weights), expected_layouts(w, recipe)[1], shape
            )

    @parameterized.parameters(np.nan, np.inf, -np.inf)
    def test_bad_values_make_their_block_nan(self, bad):
        w = weights_of((2, 300, 260), seed=1)
        w[1, 255, 259] = bad
        expected = np.zeros(w.shape, bool)
        expected[1, 128:256, 256:] = True
        got = for_training(RECIPES[0])(w)
        for layout, where in (got.forward, expected.swapaxes(1, 2)), (got.backward, expected):
            values = np.asarray(quant.dequantize(layout, jnp.float32))
            np.testing.assert_array_equal(np.isnan(values), where)

    def test_nothing_outside_of_the_matrix_is_read(self):
        """The operand is in the midst of NaN, where partial blocks would find it."""
        everything = np.full((4, 400, 400), np.nan, np.float32)
        everything[1:3, 8:281, 24:157] = w = weights_of((2, 273, 133), seed=2)
        cut = lambda x: quant.quantize_for_training(x[1:3, 8:281, 24:157], RECIPES[0])
        assert_layouts(jax.jit(cut)(everything), w, RECIPES[0])

    @parameterized.product(size=[128, 40], dtype=testing.ROW_DTYPES)
    def test_gate_and_up_side_by_side(self, size, dtype):
        """In whole blocks each is quantized in place; else they are joined before."""
        pair = [weights_of((2, 144, size), dtype, seed) for seed in (3, 4)]
        down = weights_of((2, size, 144), dtype, seed=5)
        up, of_down = jax.jit(functools.partial(quant.quantize_experts, quantization=RECIPES[0]))(
            tuple(pair), down
        )
        assert_layouts(up, np.concatenate(pair, axis=-1), RECIPES[0], "w_up")
        assert_layouts(of_down, down, RECIPES[0], "w_down")

    def test_a_pair_of_two_dtypes(self):
        gate, up = weights_of((1, 130, 128)), weights_of((1, 130, 128), jnp.bfloat16, seed=1)
        got, _ = quant.quantize_experts((gate, up), gate.mT, RECIPES[0])
        joined = np.concatenate([gate, up.astype(np.float32)], axis=-1)
        assert_layouts(got, joined, RECIPES[0])


class TransformationsTest(parameterized.TestCase):
    def test_any_leading_axes(self):
        w = weights_of((2, 3, 130, 140))
        assert_layouts(for_training(RECIPES[0])(w), w, RECIPES[0])
        assert_layouts(for_training(RECIPES[0])(w[0, 0]), w[0, 0], RECIPES[0])

    def test_no_matrices(self):
        w = np.zeros((0, 130, 140), np.float32)
        assert_layouts(for_training(RECIPES[0])(w), w, RECIPES[0])

    @parameterized.parameters(0, 1, -1)
    def test_vmap(self, axis):
        w = weights_of((2, 3, 130, 140))
        got = jax.vmap(for_training(RECIPES[0]), in_axes=axis)(np.moveaxis(w, 0, axis))
        assert_layouts(got, w, RECIPES[0])

    def test_vmap_over_one_of_a_pair(self):
        gate, up = weights_of((2, 3, 130, 128)), weights_of((3, 130, 128), seed=1)
        experts = lambda gate, up: quant.quantize_experts((gate, up), up.mT, RECIPES[0])[0]
        joined = np.concatenate([gate, np.broadcast_to(up, (2, *up.shape))], axis=-1)
        assert_layouts(jax.vmap(experts, in_axes=(0, None))(gate, up), joined, RECIPES[0])

    @parameterized.parameters(True, False)
    def test_shard_map(self, check_vma):
        w = weights_of((2 * testing.NUM_DEVICES, 130, 140))
        inside = testing.sharded(
            for_training(RECIPES[0]), testing.expert_mesh(), check_vma=check_vma
        )
        assert_layouts(inside(w), w, RECIPES[0])

    def test_a_replicated_matrix_beside_a_sharded_one(self):
        gate, up = (
            weights_of((2 * testing.NUM_DEVICES, 130, 128)),
            weights_of((2, 130, 128), seed=1),
        )
        experts = jax.shard_map(
            lambda gate, up: quant.quantize_experts((gate, up), gate.mT, RECIPES[0])[0],
            mesh=testing.expert_mesh(),
            in_specs=(P("expert"), P()),
            out_specs=P("expert"),
        )
        joined = np.concatenate([gate, np.tile(up, (testing.NUM_DEVICES, 1, 1))], axis=-1)
        assert_layouts(jax.jit(experts)(gate, up), joined, RECIPES[0])

    @parameterized.parameters(AxisType.Auto, AxisType.Explicit)
    def test_sharded_operands(self, axis_type):
        """XLA partitions them. It divides powers of two exactly on every platform."""
        mesh = testing.mesh_of((testing.NUM_DEVICES,), ("expert",), axis_type=axis_type)
        w = np.exp2(np.round(np.log2(np.abs(values_of((2 * testing.NUM_DEVICES, 130, 140))))))
        with jax.set_mesh(mesh):
            placed = jax.device_put(w.astype(np.float32), NamedSharding(mesh, P("expert")))
            got = for_training(RECIPES[1])(placed)
            assert_layouts(got, w.astype(np.float32), RECIPES[1])
            self.assertEqual(got.forward.scales.sharding.spec[0], "expert")

    def test_derivatives_are_refused(self):
        w = weights_of((1, 128, 128))
        loss = lambda w: quant.quantize_for_training(w, RECIPES[0]).forward.scales.sum()
        for derivative in jax.grad(loss), jax.grad(jax.jit(loss)), jax.grad(jax.checkpoint(loss)):
            with self.assertRaisesRegex(jax_ep.UnavailableError, "stop_gradient"):
                derivative(w)


if __name__ == "__main__":
    absltest.main()
