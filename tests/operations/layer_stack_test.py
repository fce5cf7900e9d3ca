"""Stacks of layers: a call uses one layer of its weights in place, and adds gradients to it in place."""

from __future__ import annotations

import functools

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from layer_stack import NUM_LAYERS, F, H, arguments, gradients, normal, scanned

import jax_ep

SIZES = np.array([3, 0, 4], np.int32)


class MatmulTest(parameterized.TestCase):
    @parameterized.product(transpose_rhs=[False, True], is_static=[False, True])
    def test_grouped_matmul(self, transpose_rhs, is_static):
        lhs, rhs = normal(9, 4), normal(NUM_LAYERS, 3, *((5, 4) if transpose_rhs else (4, 5)))
        matmul = functools.partial(jax_ep.grouped_matmul, transpose_rhs=transpose_rhs)
        f = jax.jit(
            lambda rhs, layer: matmul(lhs, rhs, SIZES, layer=1 if is_static else layer),
        )
        got, backward = jax.vjp(lambda rhs: f(rhs, 1), rhs)
        expected, expected_backward = jax.vjp(lambda rhs: matmul(lhs, rhs, SIZES), rhs[1])
        testing.assert_bitwise(got, np.asarray(expected))
        (gradient,), (of_layer,) = backward(got), expected_backward(expected)
        testing.assert_bitwise(gradient[1], np.asarray(of_layer))
        self.assertFalse(np.asarray(gradient)[[0, 2]].any())

    def test_a_layer_that_does_not_exist_has_no_rows(self):
        stack = normal(NUM_LAYERS, 3, 4, 5)
        f = jax.jit(lambda layer: jax_ep.grouped_matmul(normal(9, 4), stack, SIZES, layer=layer))
        for layer in -1, NUM_LAYERS:
            self.assertFalse(np.asarray(f(layer)).any())

    def test_rhs_gradient_leaves_other_layers_alone(self):
        lhs, out_gradient, sums = normal(9, 4), normal(9, 5, seed=1), normal(NUM_LAYERS * 3, 4, 5)
        f = jax.jit(
            lambda sums, layer: jax_ep.grouped_matmul_rhs_gradient(
                lhs, out_gradient, SIZES, accumulator=sums, layer=layer
            )
        )
        expected = sums.copy()
        expected[6:] = jax_ep.grouped_matmul_rhs_gradient(
            lhs, out_gradient, SIZES, accumulator=sums[6:]
        )
        testing.assert_bitwise(f(sums, 2), expected)

    def test_grouped_mlp(self):
        rows, w_up, w_down = (
            normal(9, H),
            normal(NUM_LAYERS, 3, H, 2, F),
            normal(NUM_LAYERS, 3, F, H),
        )
        b_up, b_down = normal(NUM_LAYERS, 3, 2, F), normal(NUM_LAYERS, 3, H)
        got = jax_ep.grouped_mlp(rows, w_up, w_down, SIZES, b_up=b_up, b_down=b_down, layer=2)
        expected = jax_ep.grouped_mlp(
            rows, w_up[2], w_down[2], SIZES, b_up=b_up[2], b_down=b_down[2]
        )
        testing.assert_bitwise(got, np.asarray(expected))


def function(gate, up):
    return jax.nn.silu(gate) * up


@functools.cache
def results(form, **options):
    """The outputs of the last layer, and the gradients."""
    return jax.jit(gradients(scanned(form, **options)))(*arguments())


class ScanTest(parameterized.TestCase):
    @parameterized.parameters(
        ("indexed", {"remat": None}),
        ("checkpointed", {}),
        ("chained", {"remat": "experts", "num_chunks": 2, "activation": function}),
    )
    def test_same_results_as_with_slices(self, form, options):
        (expected, expected_gradients), (y, found) = results("sliced"), results(form, **options)
        for a, b in zip((y, *found), (expected, *expected_gradients), strict=True):
            testing.assert_close(a, np.asarray(b), steps=32)
        if "activation" not in options:
            testing.assert_bitwise(y, np.asarray(expected))

    def test_gradients_of_masters_are_not_rounded(self):
        """Layers in bfloat16: those of float32 masters are float32, and round to those of bfloat16 weights."""
        x, ids, weights, *masters = arguments()
        rounded = [w.astype(jnp.bfloat16) for w in masters]
        run = jax.jit(gradients(scanned("chained")))
        _, (_, *expected) = run(x.astype(jnp.bfloat16), ids, weights, *rounded)
        _, (_, *found) = run(x.astype(jnp.bfloat16), ids, weights, *masters)
        for a, b in zip(found, expected, strict=True):
            self.assertEqual((a.dtype, b.dtype), (jnp.float32, jnp.bfloat16))
            self.assertTrue((a != a.astype(jnp.bfloat16)).any())
            testing.assert_bitwise(a.astype(jnp.bfloat16), np.asarray(b))


if __name__ == "__main__":
    absltest.main()
