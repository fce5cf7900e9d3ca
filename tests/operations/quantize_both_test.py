"""Quantizing rows as they are and transposed in one pass: the bits of two passes, and where it takes their place."""

from __future__ import annotations

import functools
from unittest import mock

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
import programs
import tier
from absl.testing import absltest, parameterized
from quantized import assert_quantized, norm, numpy_quantize, values_of

import jax_ep
from jax_ep import quant
from jax_ep._src.matmul import grouped_matmul_quantized_rhs_gradient
from jax_ep._src.matmul.row_blocks import most_row_blocks, row_blocks
from jax_ep._src.mlp import quantized_activation_gradient
from jax_ep._src.quant.quantize_both import bind_quantize_both
from jax_ep._src.quant.quantize_transposed import bind_quantize_transposed

M = 600
SIZES = (130, 0, 256, 1, 100)
ODD_SIZES = ((0, 0), (700,), (-5, 90, 0, 600, 20), (1, 2, 3, 4), (128, 128))
BLOCKS = quant.Recipe(quantized_weight_gradients=True)
POWERS = quant.Recipe(quant.Fp8Block128("power_of_two"), quantized_weight_gradients=True)
ROWS = quant.Recipe(quant.Fp8Row(), quantized_weight_gradients=True)


@functools.partial(jax.jit, static_argnames=("format", "per_column"))
def both(x, sizes, format, per_column):
    blocks = row_blocks(sizes, x.shape[0])
    arguments = (x, blocks.first_rows, blocks.num_rows, format)
    options = {"per_column": per_column, "implementation": None}
    transposed = bind_quantize_transposed(*arguments, **options)
    return bind_quantize_both(*arguments, **options), transposed, (blocks.num_rows > 0).sum()


class QuantizeBothTest(parameterized.TestCase):
    @parameterized.product(
        of=[
            (jnp.bfloat16, quant.Fp8Block128(), 300),
            (jnp.bfloat16, quant.Fp8Block128("power_of_two").for_cotangents(), 37),
            (jnp.float32, quant.Fp8Block128().for_cotangents(), 144),
            (jnp.float16, quant.Fp8Block128("power_of_two"), 264),
        ],
        sizes=(SIZES, *ODD_SIZES),
        per_column=[False, True],
    )
    def test_bits(self, of, sizes, per_column):
        dtype, format, columns = of
        x = values_of((columns, M)).T * (2.0**-8 if dtype == jnp.float16 else 1)
        num_rows = min(sum(max(size, 0) for size in sizes), M)
        x[num_rows:] = np.nan
        x = np.asarray(jnp.asarray(x, dtype))
        (rows, found), expected, used = both(x, jnp.asarray(sizes, jnp.int32), format, per_column)
        for got, wanted in zip(found, expected, strict=True):
            testing.assert_bitwise(got[:used], wanted[:used])
        in_groups = quant.Quantized(rows.values[:num_rows], rows.scales[:num_rows], format)
        if num_rows:
            assert_quantized(in_groups, numpy_quantize(x[:num_rows], format, (1, 128)))


K, N = 144, 256


def gradients(recipe, of):
    """lhs, rhs, out_bar -> the gradients of some of lhs and rhs."""

    def compute(lhs, rhs, out_bar):
        call = lambda lhs, rhs: jax_ep.grouped_matmul(
            lhs, rhs, jnp.array(SIZES), quantization=recipe
        )
        found = dict(zip(("lhs", "rhs"), jax.vjp(call, lhs, rhs)[1](out_bar), strict=True))
        return [found[name] for name in of]

    return jax.jit(compute)


def mlp_gradients(recipe, activation="swiglu"):
    def compute(rows, up, down, row_weights, y_bar):
        call = lambda *floats: jax_ep.grouped_mlp(
            *floats[:3],
            jnp.array(SIZES),
            row_weights=floats[3],
            activation=activation,
            quantization=recipe,
        )
        return jax.vjp(call, rows, up, down, row_weights)[1](y_bar)

    return jax.jit(compute)


def arguments_of_matmul(dtype=jnp.bfloat16):
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    return normal(M, K), normal(len(SIZES), K, N), normal(M, N)


def arguments_of_mlp():
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
    row_weights = jnp.asarray(rng.random(M), jnp.float32)
    return (
        *(normal(M, K), normal(len(SIZES), K, 2, N), normal(len(SIZES), N, K)),
        *(row_weights, normal(M, K)),
    )


def without(module, condition):
    return mock.patch.object(module, condition, lambda *_: False)


def in_two_passes():
    return without(grouped_matmul_quantized_rhs_gradient, "can_quantize_both")


def in_steps():
    return without(quantized_activation_gradient, "can_quantize_activation_gradient")


class GradientsTest(parameterized.TestCase):
    @parameterized.product(recipe=[BLOCKS, POWERS], dtype=[jnp.bfloat16, jnp.float32])
    def test_grouped_matmul_has_the_bits_of_two_passes(self, recipe, dtype):
        of = ("lhs", "rhs")
        found = gradients(recipe, of)(*arguments_of_matmul(dtype))
        with in_two_passes():
            expected = gradients(recipe, of)(*arguments_of_matmul(dtype))
        jax.tree.map(testing.assert_bitwise, found, expected)

    @parameterized.parameters(BLOCKS, POWERS)
    def test_grouped_mlp_has_the_bits_of_two_passes(self, recipe):
        with in_steps():
            found = mlp_gradients(recipe)(*arguments_of_mlp())
            with in_two_passes():
                expected = mlp_gradients(recipe)(*arguments_of_mlp())
        jax.tree.map(testing.assert_bitwise, found, expected)

    @parameterized.product(recipe=[BLOCKS, POWERS], activation=["swiglu", "geglu"])
    def test_activation_gradients_in_one_pass(self, recipe, activation):
        """A kernel's sigmoid may round a gradient to its neighbor in bfloat16."""
        found = mlp_gradients(recipe, activation)(*arguments_of_mlp())
        with in_steps():
            expected = mlp_gradients(recipe, activation)(*arguments_of_mlp())
        for got, wanted in zip(found, expected, strict=True):
            self.assertLess(norm(got, wanted), 5e-3 if tier.ON_GPU else 1e-6)
        if not tier.ON_GPU:
            jax.tree.map(testing.assert_bitwise, found[:3], expected[:3])


def passes(function, arguments):
    """The quantizing calls of rows, each with the shape that it reads."""
    with programs.fallback_warnings() as messages:
        program = programs.lower_for_cuda(function, *arguments)
    assert not messages, messages
    calls = [(c.target.split(".")[1], c.operands[0]) for c in program.calls]
    weights = "quantize_weights"
    return sorted(call for call in calls if "quantize" in call[0][:8] and call[0] != weights)


@tier.only_on_cpu
class LoweringTest(parameterized.TestCase):
    def test_call(self):
        program = programs.lower_for_cuda(gradients(POWERS, ("lhs", "rhs")), *arguments_of_matmul())
        call = program.call("quantize_both")
        blocks = most_row_blocks(len(SIZES), M)
        self.assertEqual(call.operands, (f"{M}x{N}xbf16", f"{blocks}xi32", f"{blocks}xi32"))
        self.assertEqual(
            call.results,
            (
                *(f"{M}x{N}xf8E4M3FN", f"{M}x{N // 128}xf32"),
                *(f"{blocks}x{N}x128xf8E4M3FN", f"{blocks}x{N // 128}xf32"),
            ),
        )
        self.assertEqual(
            call.attributes,
            {
                "per_column": ("bool", False),
                "min_amax": ("f32", np.float32(POWERS.cotangents.min_amax)),
                "power_of_two_scales": ("bool", True),
            },
        )

    def test_a_gradient_that_is_not_used_takes_its_pass_along(self):
        cotangents, rows = f"{M}x{N}xbf16", f"{M}x{K}xbf16"
        transposed_rows = ("quantize_transposed", f"{M}x{K}xf8E4M3FN")
        of = lambda *names: passes(gradients(BLOCKS, names), arguments_of_matmul())
        expected = [("quantize", rows), ("quantize_both", cotangents), transposed_rows]
        self.assertEqual(of("lhs", "rhs"), expected)
        self.assertEqual(of("lhs"), [("quantize", cotangents)])
        expected = [("quantize", rows), ("quantize_transposed", cotangents), transposed_rows]
        self.assertCountEqual(of("rhs"), expected)

    def test_grouped_mlp(self):
        """Cotangents of the result and of the activations are read once each."""
        expected = [
            ("quantize", f"{M}x{K}xbf16"),  # rows
            ("quantize_activation_gradient", f"{M}x{N}xbf16"),
            ("quantize_both", f"{M}x{K}xbf16"),
            ("quantize_transposed", f"{M}x{K}xf8E4M3FN"),  # rows
        ]
        self.assertEqual(passes(mlp_gradients(BLOCKS), arguments_of_mlp()), expected)

    def test_grouped_mlp_in_steps(self):
        """XLA computes the gradients of the pre-activation, which are read once, too."""
        expected = [
            ("quantize", f"{M}x{K}xbf16"),  # rows
            ("quantize_both", f"{M}x{2 * N}xbf16"),
            ("quantize_both", f"{M}x{K}xbf16"),
            ("quantize_transposed", f"{M}x{K}xf8E4M3FN"),  # rows
            ("quantize_transposed", f"{M}x{N}xbf16"),  # activations
        ]
        with in_steps():
            found = passes(mlp_gradients(BLOCKS), arguments_of_mlp())
        self.assertCountEqual(found, expected)

    def test_a_scale_per_row_takes_two_passes(self):
        names = [name for name, _ in passes(mlp_gradients(ROWS), arguments_of_mlp())]
        self.assertEqual(names, ["quantize"] * 3 + ["quantize_transposed"] * 4)

    def test_looking_for_nan_takes_two_passes(self):
        with jax.debug_nans(True):
            names = [name for name, _ in passes(mlp_gradients(BLOCKS), arguments_of_mlp())]
        self.assertNotIn("quantize_both", names)


if __name__ == "__main__":
    absltest.main()
