"""Weights that are quantized in memory only: calls have the bits of those with dequantized float matrices."""

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
from flax import nnx
from jax.sharding import PartitionSpec as P

import jax_ep
import jax_ep.linen
import jax_ep.nnx
from jax_ep import quant
from jax_ep._src.mlp import weights_only

RANKS = min(4, testing.NUM_DEVICES)
HIDDEN, SIZE, EXPERTS, TOKENS, TOP_K = 64, 96, 8, 24, 2
FORMATS = (quant.MxFp4(), quant.MxFp8(), quant.Fp8Row(), quant.Fp8Block128())


def clamped(gate, up, limit=1.5):
    """The activation of gpt-oss in small: a function of gate and up."""
    return jnp.clip(up, -limit, limit) * jax.nn.silu(jnp.minimum(gate, limit))


CLAMPED = jax_ep.ClampedSwiGlu(limit=1.5)


class Weights:
    """Random experts in one format, and what its values stand for."""

    def __init__(self, format, seed=0, *, gated=True):
        rng = np.random.default_rng(seed)
        self.recipe = quant.WeightsOnly(format)
        up = (2, SIZE) if gated else (SIZE,)
        shapes = (EXPERTS, HIDDEN, *up), (EXPERTS, SIZE, HIDDEN)
        given = (rng.standard_normal(s, np.float32) / 8 for s in shapes)
        self.quantized = quant.quantize_experts(*given, self.recipe, implementation="xla")
        self.b_up = rng.standard_normal((EXPERTS, *up), np.float32)
        self.b_down = rng.standard_normal((EXPERTS, HIDDEN), np.float32)

    def floats(self, dtype):
        up, down = (quant.dequantize(one.forward, dtype).mT for one in self.quantized)
        return up, down


def tokens(dtype, seed=1):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal((TOKENS, HIDDEN), np.float32), dtype)
    ids = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(TOKENS)]).astype(np.int32)
    return x, ids, rng.random((TOKENS, TOP_K), np.float32)


def assert_agree(actual, expected, row_dtype, format):
    """The kernel of GPUs adds products in an order of its own, so pre-activations may round otherwise."""
    if tier.ON_GPU and row_dtype == jnp.bfloat16 and format == quant.MxFp4():
        testing.assert_close(actual, expected, dtype=jnp.bfloat16)
    else:
        testing.assert_bitwise(actual, expected)


def on_ranks(f, specs):
    mesh = testing.expert_mesh(RANKS)
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=P("expert")))


class MoeMlpTest(parameterized.TestCase):
    @parameterized.product(
        format=FORMATS, dtype=[jnp.bfloat16, jnp.float32], activation=[clamped, CLAMPED]
    )
    def test_bits_of_values_and_gradients(self, format, dtype, activation):
        """With biases, which recipes refuse, as they do a function as the activation."""
        weights = Weights(format)
        biases = {"b_up": weights.b_up, "b_down": weights.b_down}

        def layer(matrices, options, x, ids, topk_weights, biases):
            def loss(x, topk_weights, biases):
                y, _ = jax_ep.moe_mlp(
                    x,
                    ids,
                    topk_weights,
                    *matrices,
                    axis_name="expert",
                    num_experts=EXPERTS,
                    activation=activation,
                    **options,
                    **biases,
                )
                return y

            y, pull = jax.vjp(loss, x, topk_weights, biases)
            return y, pull(jnp.ones_like(y))

        def quantized_layer(quantized, *operands):
            options = {"quantization": weights.recipe, "quantized_weights": quantized}
            return layer((None, None), options, *operands)

        operands = (*tokens(dtype), biases)
        specs = (P("expert"),) * 5
        got = on_ranks(quantized_layer, specs)(weights.quantized, *operands)
        expected = on_ranks(lambda matrices, *operands: layer(matrices, {}, *operands), specs)(
            weights.floats(dtype), *operands
        )
        for one, other in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
            assert_agree(one, other, dtype, format)

    def test_named_activation_on_a_domain(self):
        weights = Weights(quant.MxFp4())
        x, ids, topk_weights = tokens(jnp.bfloat16)

        def layer(quantized, x, ids, topk_weights, **options):
            return jax_ep.moe_mlp(
                x,
                ids,
                topk_weights,
                None,
                None,
                axis_name="expert",
                num_experts=EXPERTS,
                quantization=weights.recipe,
                quantized_weights=quantized,
                **options,
            )[0]

        specs = (P("expert"),) * 4
        operands = weights.quantized, x, ids, topk_weights
        results = [
            on_ranks(functools.partial(layer, **options), specs)(*operands)
            for options in ({}, {"remat": "dispatch"}, {"num_chunks": 2})
        ]
        for other in results[1:]:
            testing.assert_bitwise(other, results[0])

    @parameterized.product(
        activation=[clamped, CLAMPED],
        options=[{"remat": None}, {"remat": "dispatch"}, {"remat": "experts"}, {"num_chunks": 2}],
    )
    def test_gradients_with_remat_and_in_chunks(self, activation, options):
        """They are those of a layer with float matrices."""
        weights = Weights(quant.MxFp4())
        x, ids, topk_weights = tokens(jnp.bfloat16)

        def gradients(quantized, up, down, x, ids, topk_weights):
            def layer(x, topk_weights, *matrices, **quantization):
                return jax_ep.moe_mlp(
                    x,
                    ids,
                    topk_weights,
                    *matrices,
                    axis_name="expert",
                    num_experts=EXPERTS,
                    activation=activation,
                    **quantization,
                    **options,
                )[0]

            found = []
            only = {"quantization": weights.recipe, "quantized_weights": quantized}
            for matrices, quantization in (((None, None), only), ((up, down), {})):
                call = lambda *x, m=matrices, q=quantization: layer(*x, *m, **q)
                y, pull = jax.vjp(call, x, topk_weights)
                found.append((y, pull(jnp.ones_like(y))))
            return found

        specs = (P("expert"),) * 6
        floats = weights.floats(jnp.bfloat16)
        got, expected = on_ranks(gradients, specs)(weights.quantized, *floats, x, ids, topk_weights)
        for one, other in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
            assert_agree(one, other, jnp.bfloat16, quant.MxFp4())

    @parameterized.product(
        activation=["swiglu", clamped, CLAMPED],
        options=[{"remat": None}, {"remat": "dispatch"}, {"remat": "experts"}, {"num_chunks": 2}],
    )
    @tier.only_on_cpu
    def test_on_cuda_gradients_read_four_bits(self, activation, options):
        weights = Weights(quant.MxFp4())
        x, ids, topk_weights = tokens(jnp.bfloat16)

        def layer(quantized, x, ids, topk_weights):
            return jax_ep.moe_mlp(
                x,
                ids,
                topk_weights,
                None,
                None,
                axis_name="expert",
                num_experts=EXPERTS,
                activation=activation,
                quantization=weights.recipe,
                quantized_weights=quantized,
                **options,
            )[0]

        def loss(x, topk_weights):
            y = on_ranks(layer, (P("expert"),) * 4)(weights.quantized, x, ids, topk_weights)
            return y.astype(jnp.float32).sum()

        targets = programs.lower_for_cuda(jax.grad(loss, (0, 1)), x, topk_weights).targets
        chunks = options.get("num_chunks", 1)
        self.assertEqual(targets["grouped_matmul_mxfp4_lhs_gradient"], 2 * chunks)
        float_matmuls = [
            name for name in targets if "grouped_matmul" in name and "mxfp4" not in name
        ]
        self.assertEmpty(float_matmuls)

    def test_they_have_no_gradient(self):
        weights = Weights(quant.MxFp4())
        rows, sizes = tokens(jnp.bfloat16)[0], np.full(EXPERTS, TOKENS // EXPERTS, np.int32)

        def loss(scales):
            quantized = jax.tree.map(lambda one: one, weights.quantized)
            up = quant.QuantizedWeights(
                quant.Quantized(quantized[0].forward.values, scales, quant.MxFp4())
            )
            return jax_ep.grouped_mlp(
                rows,
                None,
                None,
                sizes,
                quantization=weights.recipe,
                quantized_weights=(up, quantized[1]),
            ).sum()

        with self.assertRaisesRegex(NotImplementedError, "quantized_weights are differentiated"):
            jax.grad(loss, allow_int=True)(weights.quantized[0].forward.scales)


class GroupedMlpTest(parameterized.TestCase):
    @parameterized.product(
        activation=["swiglu", "geglu", CLAMPED], row_weights=[False, True], few_rows=[False, True]
    )
    def test_bits(self, activation, row_weights, few_rows):
        if not few_rows:
            self.enterContext(unittest.mock.patch.object(weights_only, "EPILOGUE_ROWS", 0))
        weights = Weights(quant.MxFp4())
        x, sizes = tokens(jnp.bfloat16)[0], np.array([5, 0, 3, 1, 7, 2, 0, 4], np.int32)
        options = {"activation": activation, "b_up": weights.b_up, "b_down": weights.b_down}
        scale = np.linspace(0, 1, TOKENS, dtype=np.float32) if row_weights else None
        call = lambda x: jax_ep.grouped_mlp(
            x,
            None,
            None,
            sizes,
            scale,
            quantization=weights.recipe,
            quantized_weights=weights.quantized,
            **options,
        )
        got = jax.jit(call)(x)
        expected = jax_ep.grouped_mlp(x, *weights.floats(jnp.bfloat16), sizes, scale, **options)
        assert_agree(got, expected, jnp.bfloat16, quant.MxFp4())

    @parameterized.parameters(CLAMPED, clamped)
    def test_outside_of_jit_nothing_is_dequantized(self, activation):
        """No equation has the size of a matrix, nor has one of a derivative."""
        weights = Weights(quant.MxFp4())
        x, sizes = tokens(jnp.bfloat16)[0], np.full(EXPERTS, TOKENS // EXPERTS, np.int32)

        def call(x, weights):
            return jax_ep.grouped_mlp(
                x,
                None,
                None,
                sizes,
                activation=activation,
                quantization=weights.recipe,
                quantized_weights=weights.quantized,
            )

        def gradient(x, weights):
            return jax.grad(lambda x: call(x, weights).astype(jnp.float32).sum())(x)

        def float_matrices(function, *arguments):
            text = str(jax.make_jaxpr(function)(*arguments))
            both = (HIDDEN, 2 * SIZE), (2 * SIZE, HIDDEN)
            return sum(text.count(f"bf16[{EXPERTS},{k},{n}]") for k, n in both)

        for function in call, gradient:
            self.assertEqual(float_matrices(functools.partial(function, weights=weights), x), 0)
            other_format = functools.partial(function, weights=Weights(quant.MxFp8()))
            self.assertGreater(float_matrices(other_format, x), 0)

    @parameterized.product(
        activation=["swiglu", "relu", CLAMPED, clamped], row_weights=[False, True]
    )
    @tier.only_on_cpu
    def test_on_cuda_matmuls_read_four_bits(self, activation, row_weights):
        weights = Weights(quant.MxFp4(), gated=activation != "relu")
        x, sizes = tokens(jnp.bfloat16)[0], np.array([5, 0, 3, 1, 7, 2, 0, 4], np.int32)
        scale = np.ones(TOKENS, np.float32) if row_weights else None

        def call(x, b_up):
            return jax_ep.grouped_mlp(
                x,
                None,
                None,
                sizes,
                scale,
                activation=activation,
                b_up=b_up,
                quantization=weights.recipe,
                quantized_weights=weights.quantized,
            )

        few_rows = programs.lower_for_cuda(call, x, weights.b_up)
        self.enterContext(unittest.mock.patch.object(weights_only, "EPILOGUE_ROWS", 0))
        program = programs.lower_for_cuda(call, x, weights.b_up)
        epilogues = {"grouped_matmul_mxfp4": 1 - row_weights}
        epilogues["grouped_matmul_mxfp4_activation"] = 1 + row_weights
        expected = {"grouped_matmul_mxfp4": 2, "grouped_matmul": 1}  # the bias is a matmul
        if activation != clamped:
            expected = {name: count for name, count in epilogues.items() if count}
            self.assertEqual(few_rows.targets, {"grouped_matmul_mxfp4": 2})
        self.assertEqual(program.targets, expected)
        loss = lambda *given: call(*given).astype(jnp.float32).sum()
        gradient = jax.value_and_grad(loss, (0, 1))
        targets = programs.lower_for_cuda(gradient, x, weights.b_up).targets
        # A matmul sums the gradient of b_up.
        of_gradient = {"grouped_matmul_mxfp4_lhs_gradient": 2, "grouped_matmul_rhs_gradient": 1}
        self.assertEqual(targets, expected | of_gradient)

    @parameterized.parameters((jnp.float32, quant.MxFp4()), (jnp.bfloat16, quant.MxFp8()))
    @tier.only_on_cpu
    def test_on_cuda_other_rows_and_formats_are_dequantized(self, dtype, format):
        weights = Weights(format)
        x, sizes = tokens(dtype)[0], np.full(EXPERTS, TOKENS // EXPERTS, np.int32)
        options = {"quantization": weights.recipe, "quantized_weights": weights.quantized}
        call = lambda x: jax_ep.grouped_mlp(x, None, None, sizes, **options)
        targets = programs.lower_for_cuda(call, x).targets
        self.assertEqual(targets, {"grouped_matmul_activation": 1, "grouped_matmul": 1})

    @tier.only_on_cpu
    def test_another_gpu_dequantizes_and_warns(self):
        weights = Weights(quant.MxFp4())
        x, sizes = tokens(jnp.bfloat16)[0], np.full(EXPERTS, TOKENS // EXPERTS, np.int32)
        options = {"quantization": weights.recipe, "quantized_weights": weights.quantized}
        call = lambda x: jax_ep.grouped_mlp(x, None, None, sizes, **options)
        older = unittest.mock.patch.object(
            jax_ep._src.core.runtime, "compute_capabilities", lambda: {"8.0"}
        )
        with older, programs.fallback_warnings() as messages:
            targets = programs.lower_for_cuda(call, x).targets
        self.assertEqual(targets, {"grouped_matmul": 2})
        self.assertTrue(any("four-bit weights need GPUs" in message for message in messages))


class ModulesTest(parameterized.TestCase):
    @parameterized.product(
        mesh=[((RANKS,), ("expert",)), ((2, RANKS // 2), ("data", "expert"))], use_bias=[True]
    )
    def test_nnx_and_linen(self, mesh, use_bias):
        """The layers' calls have the numbers of one with dequantized matrices; FSDP gathers four bits."""
        if RANKS < 4:
            self.skipTest("needs four devices")
        weights = Weights(quant.MxFp4())
        mesh = testing.mesh_of(*mesh)
        shared = {"mesh": mesh, "use_bias": use_bias, "activation": CLAMPED, "dtype": jnp.float32}
        if "data" in mesh.axis_names:
            shared["fsdp_axis"] = "data"
        sizes = (HIDDEN, SIZE, EXPERTS, TOP_K)
        floats = jax_ep.nnx.MoE(*sizes, **shared, rngs=nnx.Rngs(0))
        up, down = weights.floats(jnp.float32)
        floats.w_up[...], floats.w_down[...] = up.reshape(floats.w_up.shape), down
        x = tokens(jnp.float32)[0]
        expected, _ = nnx.jit(lambda layer, x: layer(x))(floats, x)
        only = {"quantization": weights.recipe, "quantized_only": True}
        layer = jax_ep.nnx.MoE(*sizes, **shared, **only, rngs=nnx.Rngs(0))
        for name in ("router_kernel", "b_up", "b_down"):
            getattr(layer, name)[...] = getattr(floats, name)[...]
        call = nnx.jit(lambda layer, x, quantized: layer(x, quantized_weights=quantized)[0])
        testing.assert_bitwise(call(layer, x, weights.quantized), expected)
        linen = jax_ep.linen.MoE(*sizes, **shared, **only)
        params = {n: getattr(layer, n)[...] for n in ("router_kernel", "b_up", "b_down")}
        y, _ = jax.jit(linen.apply)({"params": params}, x, quantized_weights=weights.quantized)
        testing.assert_bitwise(y, expected)

    @tier.only_on_cpu
    def test_on_cuda_gradients_read_four_bits(self):
        weights = Weights(quant.MxFp4())
        mesh = testing.mesh_of((RANKS,), ("expert",))
        options = {"mesh": mesh, "quantization": weights.recipe, "quantized_only": True}
        options |= {"use_bias": True, "activation": CLAMPED, "dtype": jnp.bfloat16}
        sizes = (HIDDEN, SIZE, EXPERTS, TOP_K)
        layer = jax_ep.nnx.MoE(*sizes, **options, rngs=nnx.Rngs(0))
        linen = jax_ep.linen.MoE(*sizes, **options)
        params = {n: getattr(layer, n)[...] for n in ("router_kernel", "b_up", "b_down")}
        calls = (
            lambda x: layer(x, quantized_weights=weights.quantized),
            lambda x: linen.apply({"params": params}, x, quantized_weights=weights.quantized),
        )
        for call in calls:
            gradient = jax.grad(lambda x, call=call: call(x)[0].astype(jnp.float32).sum())
            targets = programs.lower_for_cuda(gradient, tokens(jnp.bfloat16)[0]).targets
            self.assertEqual(targets["grouped_matmul_mxfp4_lhs_gradient"], 2)
            self.assertNotIn("grouped_matmul_activation_gradient", targets)


if __name__ == "__main__":
    absltest.main()
