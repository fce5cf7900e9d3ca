"""grouped_mlp and moe_mlp by a recipe, against matmuls of dequantized operands that JAX differentiates, and float32."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
import programs
import tier
from absl.testing import absltest, parameterized
from jax.sharding import PartitionSpec as P
from quantized import norm

import jax_ep
from jax_ep import quant
from jax_ep._src.matmul.activations import activate

BLOCKS = quant.Recipe()
ROWS = quant.Recipe(quant.Fp8Row(), quant.Fp8Row(jnp.float8_e5m2))
H, F = 144, 128
TOKENS = 64  # all ranks have these together
SIZES = np.array([20, 0, 17, 8], np.int32)
M, END = 48, 45


# ---- the reference: a loop over groups, whose operands pass through the formats


def through(quantize, x, format):
    return quant.dequantize(quantize(x, format), jnp.float32)


def reference_matmul(recipe, quantizes_rows_of_gradient):
    """rows, w -> products of dequantized operands, with the derivatives that the recipe says."""

    def by_group(f, *arrays):
        bounds = np.cumsum([0, *SIZES])
        return [
            f(g, *(a[i:j] for a in arrays)) for g, (i, j) in enumerate(itertools.pairwise(bounds))
        ]

    def products(rows, w):
        return jnp.concatenate(
            [*by_group(lambda g, r: r @ w[g], rows), jnp.zeros((M - END, w.shape[2]))]
        )

    def weights(w):
        return through(quant.quantize_weights, w, recipe.weights)

    @jax.custom_vjp
    def matmul(rows, w):
        return products(through(quant.quantize, rows, recipe.rows), weights(w))

    def backward(residuals, out_bar):
        rows, w = residuals
        rows_bar = products(through(quant.quantize, out_bar, recipe.cotangents), weights(w.mT))
        if quantizes_rows_of_gradient:
            rows = through(quant.quantize, rows, recipe.rows)
        return rows_bar, jnp.stack(by_group(lambda g, r, o: r.T @ o, rows, out_bar))

    matmul.defvjp(lambda rows, w: (matmul(rows, w), (rows, w)), backward)
    return matmul


def reference_mlp(recipe, activation, rows, row_weights, w_up, w_down):
    pre_activation = reference_matmul(recipe, True)(rows, w_up.reshape(*w_up.shape[:2], -1))
    activations = activate(activation, pre_activation) * row_weights[:, None]
    return reference_matmul(recipe, False)(activations, w_down)


def problem(activation, seed=0):
    """rows, row weights, w_up, w_down and the cotangent, in float32; tails are NaN."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    up = normal(4, H, F) if activation == "relu2" else normal(4, H, 2, F)
    arrays = (
        normal(M, H),
        rng.random(M, np.float32),
        up / H**0.5,
        normal(4, F, H) / F**0.5,
        normal(M, H),
    )
    for array in arrays[0], arrays[1], arrays[4]:
        array[END:] = np.nan
    return arrays


def with_gradients(mlp):
    """(rows, row weights, w_up, w_down, y_bar) -> y, and the gradients of the first four."""

    def compute(*arrays):
        y, pull_back = jax.vjp(mlp, *arrays[:-1])
        return y, *pull_back(arrays[-1])

    return jax.jit(compute)


class GroupedMlpTest(parameterized.TestCase):
    @parameterized.parameters(
        (BLOCKS, "swiglu"), (BLOCKS, "relu2"), (ROWS, "swiglu"), (BLOCKS, jax_ep.ClampedSwiGlu(1.3))
    )
    def test_agrees_with_the_reference(self, recipe, activation):
        *arrays, y_bar = problem(activation)
        ours = lambda rows, weights, up, down: jax_ep.grouped_mlp(
            rows, up, down, SIZES, weights, activation=activation, quantization=recipe
        )
        clean = [np.nan_to_num(a) for a in (*arrays, y_bar)]
        expected = with_gradients(functools.partial(reference_mlp, recipe, activation))(*clean)
        found = with_gradients(ours)(*arrays, y_bar)
        # An accumulator that rounds otherwise may take a value to its neighbor among eight bits.
        bound = 1e-2 if tier.ON_GPU else 2e-3
        names = ("y", "rows", "row weights", "w_up", "w_down")
        for name, result, other in zip(names, found, expected, strict=True):
            self.assertLess(norm(result, other), bound, name)
            if name in ("y", "rows", "row weights"):
                testing.assert_bitwise(result[END:], np.zeros_like(result[END:]), name)

    @parameterized.parameters((BLOCKS, "swiglu"), (BLOCKS, "relu2"), (ROWS, "swiglu"))
    def test_small_cotangents_lose_nothing(self, recipe, activation):
        """A power of two changes no bit of a gradient."""
        *arrays, y_bar = map(np.nan_to_num, problem(activation))
        compute = with_gradients(
            lambda rows, weights, up, down: jax_ep.grouped_mlp(
                rows, up, down, SIZES, weights, activation=activation, quantization=recipe
            )
        )
        _, *expected = compute(*arrays, y_bar)
        scale = np.float32(2.0**-80)
        for result, other in zip(compute(*arrays, y_bar * scale)[1:], expected, strict=True):
            testing.assert_bitwise(result / scale, other)

    def test_matrices_of_every_form(self):
        _, _, up, down, _ = problem("swiglu")
        expected = quant.quantize_experts(up, down, BLOCKS)
        self.assertEqual(expected[0].forward.shape, (4, 2 * F, H))
        self.assertEqual(expected[1].backward.shape, (4, F, H))
        for form in up.reshape(4, H, 2 * F), (up[:, :, 0], up[:, :, 1]):
            jax.tree.map(
                testing.assert_bitwise, quant.quantize_experts(form, down, BLOCKS), expected
            )


# ---- moe_mlp


@functools.cache
def layer_problem():
    """x, ids, weights, w_up, w_down, of all ranks."""
    rng = np.random.default_rng(0)
    experts = 2 * testing.NUM_DEVICES
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    ids = np.argsort(rng.random((TOKENS, experts)), 1)[:, :2].astype(np.int32)
    weights = rng.random((TOKENS, 2), np.float32)
    return (
        normal(TOKENS, H),
        ids,
        weights,
        normal(experts, H, 2, F) / H**0.5,
        normal(experts, F, H) / F**0.5,
    )


@functools.cache
def gradients(dtype=jnp.bfloat16, policy=None, scale=1.0, of_outputs=jnp.cos, **options):
    """(*layer_problem(), quantized) -> gradients of x, weights, w_up and w_down."""

    def layer(x, ids, weights, up, down, quantized):
        y, _ = jax_ep.moe_mlp(
            x, ids, weights, up, down, axis_name="expert", quantized_weights=quantized, **options
        )
        return y

    if policy is not None:
        layer = jax.checkpoint(layer, policy=policy)
    mapped = jax.shard_map(
        layer, mesh=testing.expert_mesh(), in_specs=P("expert"), out_specs=P("expert")
    )

    def loss(x, ids, weights, up, down, quantized):
        y = mapped(x.astype(dtype), ids, weights, up, down, quantized)
        return jnp.sum(y.astype(jnp.float32) * of_outputs(jnp.arange(H))) * scale

    return jax.jit(jax.grad(loss, (0, 2, 3, 4)))


class MoeMlpTest(parameterized.TestCase):
    def test_gradients_are_near_those_of_float32(self):
        """Rows, weights, activations and cotangents each err by up to 2.6 % of their norm."""
        expected = gradients(jnp.float32)(*layer_problem(), None)
        found = gradients(quantization=BLOCKS)(*layer_problem(), None)
        for name, result, exact in zip(
            ("x", "weights", "w_up", "w_down"), found, expected, strict=True
        ):
            self.assertEqual(result.dtype, jnp.float32)
            self.assertBetween(norm(result, exact), 0.03, 0.075, name)

    @parameterized.parameters(dict(remat="dispatch"), dict(remat=None), dict(remat="experts"))
    def test_weights_quantized_before_give_the_same_bits(self, remat):
        arrays = layer_problem()
        quantized = quant.quantize_experts(*arrays[3:], BLOCKS)
        expected = gradients(quantization=BLOCKS)(*arrays, None)
        found = gradients(quantization=BLOCKS, remat=remat)(*arrays, quantized)
        jax.tree.map(testing.assert_bitwise, found, expected)

    def test_the_gradient_of_quantized_weights_is_refused(self):
        """It would be zeros. Those of stopped matrices may stand in a differentiated function."""
        x, ids, weights, *experts = layer_problem()

        def layer(experts, quantized):
            options = dict(quantization=BLOCKS, quantized_weights=quantized)
            return jax_ep.moe_mlp(x, ids, weights, *experts, axis_name="expert", **options)[0]

        mesh = testing.expert_mesh(1)
        mapped = jax.shard_map(layer, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))
        quantized = quant.quantize_experts(*experts, BLOCKS)
        for transform in (lambda f: f), jax.jit, jax.checkpoint:
            loss = transform(lambda quantized: mapped(experts, quantized).sum())
            with self.assertRaisesRegex(jax_ep.UnavailableError, "quantized_weights are diff"):
                jax.grad(loss)(quantized)

        def of_stopped(experts):
            stopped = jax.lax.stop_gradient(experts)
            return mapped(experts, quant.quantize_experts(*stopped, BLOCKS)).sum()

        found = jax.jit(jax.grad(of_stopped))(experts)
        expected = jax.jit(jax.grad(lambda experts: mapped(experts, quantized).sum()))(experts)
        jax.tree.map(testing.assert_bitwise, found, expected)

    @parameterized.parameters(dict(remat="dispatch"), dict(remat=None), dict(remat="experts"))
    def test_rows_that_are_sent_quantized_give_the_same_bits(self, remat):
        recipe = quant.Recipe(quantized_dispatch=True)
        expected = gradients(quantization=BLOCKS)(*layer_problem(), None)
        found = gradients(quantization=recipe, remat=remat)(*layer_problem(), None)
        jax.tree.map(testing.assert_bitwise, found, expected)

    @parameterized.product(remat=["dispatch", None, "experts"], quantized_dispatch=[False, True])
    def test_cotangents_that_are_sent_quantized_change_one_gradient(
        self, remat, quantized_dispatch
    ):
        recipe = quant.Recipe(quantized_dispatch=quantized_dispatch, quantized_cotangents=True)
        expected = gradients(quantization=BLOCKS)(*layer_problem(), None)
        found = gradients(quantization=recipe, remat=remat)(*layer_problem(), None)
        jax.tree.map(testing.assert_bitwise, found[:3], expected[:3])
        self.assertBetween(norm(found[3], expected[3]), 0.005, 0.04)

    @parameterized.parameters(BLOCKS, ROWS)
    def test_cotangents_that_eight_bits_hold_change_none(self, recipe):
        """Such as powers of two, whose quotients by the scale are eight-bit values."""
        exact = {"of_outputs": lambda column: jnp.exp2(column % 5) * (1 - 2 * (column % 2))}
        expected = gradients(quantization=recipe, **exact)(*layer_problem(), None)
        sent = dataclasses.replace(recipe, quantized_cotangents=True)
        found = gradients(quantization=sent, **exact)(*layer_problem(), None)
        jax.tree.map(testing.assert_bitwise, found, expected)

    @tier.only_on_cpu
    def test_on_cuda_cotangents_are_half_of_the_bytes(self):
        recipe = quant.Recipe(quantized_dispatch=True, quantized_cotangents=True)
        program = programs.lower_for_cuda(gradients(quantization=recipe), *layer_problem(), None)
        sent = [c for c in program.calls if c.target.split(".")[1] in ("dispatch", "redispatch")]
        self.assertLen(sent, 3)
        for call in sent:
            self.assertEqual(call.operands[:2], ("8x144xf8E4M3FN", "8x2xf32"))

    @parameterized.parameters((None, 1), ("dispatch", 2))
    @tier.only_on_cpu
    def test_on_cuda_half_of_the_bytes_are_sent(self, remat, transfers):
        recipe = quant.Recipe(quantized_dispatch=True)
        program = programs.lower_for_cuda(
            gradients(quantization=recipe, remat=remat), *layer_problem(), None
        )
        sent = [c for c in program.calls if c.target.split(".")[1] in ("dispatch", "redispatch")]
        to_experts = [c for c in sent if c.operands[:2] == ("8x144xf8E4M3FN", "8x2xf32")]
        self.assertLen(to_experts, transfers)
        # The cotangent of combine is sent as it is.
        self.assertLen(sent, transfers + 1)

    @parameterized.parameters(False, True)
    def test_small_cotangents_lose_nothing(self, quantized_dispatch):
        """A power of two changes no bit of a gradient."""
        recipe = quant.Recipe(quantized_dispatch=quantized_dispatch)
        expected = gradients(quantization=recipe)(*layer_problem(), None)
        scale = 2.0**-80
        found = gradients(quantization=recipe, scale=scale)(*layer_problem(), None)
        for result, other in zip(found, expected, strict=True):
            testing.assert_bitwise(result / np.float32(scale), other)

    @parameterized.parameters(BLOCKS, quant.Recipe(quantized_cotangents=True))
    def test_chunks(self, recipe):
        arrays = layer_problem()
        expected = gradients(quantization=recipe)(*arrays, None)
        for result, other in zip(
            gradients(quantization=recipe, num_chunks=2)(*arrays, None), expected, strict=True
        ):
            self.assertLess(norm(result, other), 1e-6)

    @parameterized.parameters(None, "dispatch")
    def test_checkpoint_keeps_every_bit(self, remat):
        """jax.checkpoint rounds the floats that it keeps, eight-bit ones to infinities."""
        recipe = quant.Recipe(quantized_dispatch=True, quantized_cotangents=True)
        expected = gradients(quantization=recipe)(*layer_problem(), None)
        for policy in (
            jax.checkpoint_policies.save_only_these_names(*jax_ep.REMAT_NAMES),
            jax.checkpoint_policies.everything_saveable,
        ):
            found = gradients(quantization=recipe, remat=remat, policy=policy)(
                *layer_problem(), None
            )
            jax.tree.map(testing.assert_bitwise, found, expected)

    @tier.only_on_cpu
    def test_on_cuda_it_is_kernels(self):
        arrays = layer_problem()
        quantized = quant.quantize_experts(*arrays[3:], BLOCKS)
        with programs.fallback_warnings() as messages:
            program = programs.lower_for_cuda(gradients(quantization=BLOCKS), *arrays, quantized)
        self.assertEmpty(messages)
        matmuls = {name: n for name, n in program.targets.items() if "matmul" in name}
        # The loss is linear, so that no gradient reads y and the last matmul of forward is left out.
        expected = {
            "grouped_matmul_quantized": 2,
            "grouped_matmul_quantized_activation": 1,
            "grouped_matmul_rhs_gradient": 2,
        }
        self.assertEqual(matmuls, expected)


if __name__ == "__main__":
    absltest.main()
