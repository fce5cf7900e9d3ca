"""grouped_matmul by a recipe: its result and gradients are products of quantized operands in float64."""

from __future__ import annotations

import functools

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
import numpy_moe
import programs
import tier
from absl.testing import absltest, parameterized
from quantized import assert_products, exact, norm

import jax_ep
from jax_ep import quant

BLOCKS = quant.Recipe()
ROWS = quant.Recipe(quant.Fp8Row(), quant.Fp8Row(jnp.float8_e5m2))
RECIPES = (BLOCKS, ROWS, quant.Recipe(quant.Fp8Block128("power_of_two")))
# Norms of the error of gradients over those of float32, with normal operands. Three bits of mantissa err by 2.6 %, two bits by
# 5.2 %. An input gradient has the errors of cotangents and weights.
NORMS = {BLOCKS: (0.045, 0.035), ROWS: (0.065, 0.035)}
SIZES = np.array([20, 0, 33, 7], np.int32)
M, K, N, END = 64, 272, 144, 60


def problem(dtype=jnp.bfloat16, seed=0):
    """lhs, rhs and the cotangent; tails are NaN."""
    rng = np.random.default_rng(seed)
    lhs, out_bar = rng.normal(size=(M, K)), rng.normal(size=(M, N))
    lhs[END:] = out_bar[END:] = np.nan
    return (
        jnp.asarray(lhs, dtype),
        rng.normal(size=(4, K, N)).astype(np.float32),
        jnp.asarray(out_bar, dtype),
    )


@functools.cache
def with_gradients(recipe, transpose_rhs=False):
    """(lhs, rhs, quantized, out_bar) -> the result, and the gradients of lhs and rhs."""

    def compute(lhs, rhs, quantized, out_bar):
        call = lambda lhs, rhs: jax_ep.grouped_matmul(
            lhs,
            rhs,
            SIZES,
            quantization=recipe,
            quantized_rhs=quantized,
            transpose_rhs=transpose_rhs,
        )
        out, pull_back = jax.vjp(call, lhs, rhs)
        return out, *pull_back(out_bar)

    return jax.jit(compute)


def check_weight_gradient(result, rows, out_bar):
    """Compares with that of the dequantized rows: the kernel's bits, or sums that XLA adds in an order of each program's own."""
    if tier.ON_GPU:
        expected = jax_ep.grouped_matmul_rhs_gradient(
            rows, out_bar, SIZES, preferred_element_type=jnp.float32
        )
        return testing.assert_bitwise(result, expected, "weight gradient")
    lhs, out_bar = (np.asarray(a, np.float64) for a in (rows, out_bar))
    sums = [
        numpy_moe.grouped_matmul_gradient(f(lhs), np.zeros((4, K, N)), SIZES, f(out_bar))[1]
        for f in (np.asarray, np.abs)
    ]
    testing.assert_sums(result, *sums, num_terms=max(SIZES), message="weight gradient")


class RecipeTest(parameterized.TestCase):
    @parameterized.product(recipe=RECIPES, transpose_rhs=[False, True])
    def test_products_of_quantized_operands(self, recipe, transpose_rhs):
        lhs, rhs, out_bar = problem()
        quantized = quant.quantize_for_training(rhs, recipe)
        given = rhs.mT if transpose_rhs else rhs
        out, lhs_bar, rhs_bar = with_gradients(recipe, transpose_rhs)(lhs, given, None, out_bar)
        self.assertEqual(
            [a.dtype for a in (out, lhs_bar, rhs_bar)], [jnp.bfloat16, jnp.bfloat16, jnp.float32]
        )

        def check(result, rows, matrices, name):
            a, b = exact(rows), exact(matrices)
            products = [
                numpy_moe.grouped_matmul(f(a), f(b), SIZES, transpose_rhs=True)
                for f in (np.asarray, np.abs)
            ]
            assert_products(result[:END], *(p[:END] for p in products), name)
            testing.assert_bitwise(result[END:], np.zeros_like(result[END:]), name)

        rows = quant.quantize(lhs, recipe.rows)
        check(out, rows, quantized.forward, "forward")
        check(
            lhs_bar,
            quant.quantize(out_bar, recipe.cotangents),
            quantized.backward,
            "input gradient",
        )
        check_weight_gradient(
            rhs_bar.mT if transpose_rhs else rhs_bar, quant.dequantize(rows), out_bar
        )

    @parameterized.parameters(*NORMS)
    def test_gradients_are_near_those_of_float32(self, recipe):
        lhs, rhs, out_bar = problem(jnp.float32)
        found = with_gradients(recipe)(lhs, rhs, None, out_bar)
        _, pull_back = jax.vjp(lambda lhs, rhs: jax_ep.grouped_matmul(lhs, rhs, SIZES), lhs, rhs)
        for result, expected, bound in zip(
            found[1:], pull_back(out_bar), NORMS[recipe], strict=True
        ):
            error = np.linalg.norm(result - expected) / np.linalg.norm(expected)
            self.assertBetween(error, bound / 3, bound)

    @parameterized.product(recipe=RECIPES, n=[1e6, 1e9, 1e10, 1e20, 1e30])
    def test_small_cotangents_lose_nothing(self, recipe, n):
        """The gradient of a mean over n tokens has the error of that of a sum."""
        lhs, rhs, out_bar = problem()
        out_bar = np.nan_to_num(np.asarray(out_bar, np.float32))
        compute = with_gradients(recipe)
        found = compute(lhs, rhs, None, jnp.asarray(out_bar / n, jnp.bfloat16))[1:]
        expected = compute(lhs, rhs, None, jnp.asarray(out_bar, jnp.bfloat16))[1:]
        for result, other in zip(found, expected, strict=True):
            self.assertLess(norm(np.asarray(result, np.float64) * n, other), 0.05)

    @parameterized.parameters(*RECIPES)
    def test_powers_of_two_change_no_bit_of_a_gradient(self, recipe):
        lhs, rhs, out_bar = problem()
        compute = with_gradients(recipe)
        expected = compute(lhs, rhs, None, out_bar)[1:]
        for scale in 2.0**-40, 2.0**-90:
            found = compute(lhs, rhs, None, out_bar * scale)[1:]
            restored = [result / jnp.asarray(scale, result.dtype) for result in found]
            jax.tree.map(testing.assert_bitwise, restored, list(expected))

    @parameterized.parameters(*RECIPES)
    def test_cotangents_of_zero(self, recipe):
        lhs, rhs, out_bar = problem()
        for gradient in with_gradients(recipe)(lhs, rhs, None, jnp.zeros_like(out_bar))[1:]:
            testing.assert_bitwise(gradient, np.zeros_like(gradient))

    @parameterized.parameters(BLOCKS, ROWS)
    def test_weights_quantized_before_give_the_same_bits(self, recipe):
        lhs, rhs, out_bar = problem()
        quantized = quant.quantize_for_training(rhs, recipe)
        expected = with_gradients(recipe)(lhs, rhs, None, out_bar)
        found = with_gradients(recipe)(lhs, rhs, quantized, out_bar)
        jax.tree.map(testing.assert_bitwise, found, expected)

    def test_layouts(self):
        _, rhs, _ = problem()
        for recipe in (BLOCKS, ROWS):
            for transpose_rhs in False, True:
                both = quant.quantize_for_training(
                    rhs.mT if transpose_rhs else rhs, recipe, transpose_rhs=transpose_rhs
                )
                self.assertEqual((both.forward.shape, both.backward.shape), ((4, N, K), (4, K, N)))
                forward = quant.quantize_weights(rhs, recipe.weights).mT
                jax.tree.map(testing.assert_bitwise, both.forward, forward)
                backward = quant.quantize_weights(rhs.mT, recipe.weights).mT
                jax.tree.map(testing.assert_bitwise, both.backward, backward)

    @parameterized.parameters(BLOCKS, ROWS)
    @tier.only_on_cpu
    def test_on_cuda_it_is_five_kernels(self, recipe):
        lhs, rhs, out_bar = problem()
        quantized = quant.quantize_for_training(rhs, recipe)
        program = programs.lower_for_cuda(with_gradients(recipe), lhs, rhs, quantized, out_bar)
        self.assertEqual(
            program.targets,
            {"quantize": 2, "grouped_matmul_quantized": 2, "grouped_matmul_rhs_gradient": 1},
        )
        # Nothing but the kernels touches the matrices; a bitcast costs nothing.
        self.assertEmpty(program.operations_on(rhs.size) - {"constant", "bitcast_convert"})


if __name__ == "__main__":
    absltest.main()
