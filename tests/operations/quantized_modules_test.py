"""nnx.MoE and linen.MoE by a recipe, on one axis and on meshes that shard the matrices."""

from __future__ import annotations

import re

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
import programs
import tier
from absl.testing import absltest, parameterized
from flax import nnx
from jax.sharding import AxisType
from quantized import norm

import jax_ep.linen
import jax_ep.nnx
from jax_ep import quant

BLOCKS = quant.Recipe()
ROWS = quant.Recipe(quant.Fp8Row(), quant.Fp8Row(jnp.float8_e5m2))
H, F = 144, 128
TOKENS = 64  # all ranks have these together


class ModulesTest(absltest.TestCase):
    def test_nnx_and_linen(self):
        mesh = testing.expert_mesh()
        sizes = dict(
            hidden_size=H, intermediate_size=F, num_experts=2 * testing.NUM_DEVICES, top_k=2
        )
        options = sizes | dict(mesh=mesh, dtype=jnp.bfloat16)
        x = np.random.default_rng(0).normal(size=(TOKENS, 1, H)).astype(np.float32)

        def loss(y, stats):
            return jnp.sum(jnp.square(y.astype(jnp.float32)))

        def of_nnx(quantization, quantized):
            layer = jax_ep.nnx.MoE(**options, quantization=quantization, rngs=nnx.Rngs(0))
            compute = lambda layer, x, quantized: loss(*layer(x, quantized_weights=quantized))
            gradients = nnx.jit(nnx.grad(compute))(layer, x, quantized)
            return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(gradients)))

        params = nnx.to_pure_dict(nnx.state(jax_ep.nnx.MoE(**options, rngs=nnx.Rngs(0)), nnx.Param))
        quantized = quant.quantize_experts(params["w_up"], params["w_down"], BLOCKS)
        of_linen = jax_ep.linen.MoE(**options, quantization=BLOCKS)
        of_params = of_linen.quantize_weights({"params": params})
        jax.tree.map(testing.assert_bitwise, of_params, quantized)
        found = of_nnx(BLOCKS, quantized)
        for name, exact in of_nnx(None, None).items():
            self.assertBetween(norm(found[name], exact), 0.02, 0.1, name)

        layer = jax_ep.linen.MoE(**options, quantization=BLOCKS)
        compute = lambda params: loss(*layer.apply({"params": params}, x))
        jax.tree.map(testing.assert_bitwise, jax.jit(jax.grad(compute))(params), found)

    def test_a_mean_over_many_tokens(self):
        """Its gradients have the errors of those of a sum, the router's among them."""
        options = dict(mesh=testing.expert_mesh(), dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        x = np.random.default_rng(0).normal(size=(TOKENS, 1, H)).astype(np.float32)
        layer = jax_ep.nnx.MoE(H, F, 2 * testing.NUM_DEVICES, 2, **options, quantization=BLOCKS)

        @nnx.jit
        def compute(layer, x, scale):
            loss = lambda layer, x: jnp.sum(layer(x)[0].astype(jnp.float32) * jnp.arange(H)) * scale
            gradients = nnx.grad(loss, argnums=(0, 1))(layer, x)
            return jax.tree.map(lambda gradient: gradient / scale, gradients)

        found, expected = (compute(layer, x, np.float32(2.0**-n)) for n in (32, 0))
        jax.tree.map(testing.assert_bitwise, found, expected)


@tier.only_on_cpu
class ShardedModulesTest(parameterized.TestCase):
    """Quantized weights on meshes whose axes shard the matrices."""

    @parameterized.parameters(
        (("data", "tensor"), BLOCKS, "swiglu"),
        (("data",), ROWS, "swiglu"),
        (("data", "tensor"), ROWS, "swiglu"),
        (("tensor",), ROWS, "relu2"),
    )
    def test_they_are_those_of_the_call(self, axes, recipe, activation):
        size = 256
        mesh = testing.mesh_of((2, 2, 2), ("data", "expert", "tensor"))
        layer = jax_ep.nnx.MoE(
            *(size, size, 4, 2),
            mesh=mesh,
            batch_axes=("data", "expert"),
            fsdp_axis="data" if "data" in axes else None,
            tensor_axis="tensor" if "tensor" in axes else None,
            activation=activation,
            quantization=recipe,
            rngs=nnx.Rngs(0),
        )
        x = jax.random.normal(jax.random.key(1), (8, 3, size))
        quantized = jax.jit(quant.quantize_experts, static_argnums=2)(
            layer.w_up[...], layer.w_down[...], recipe
        )
        on_ranks = layer.quantize_weights()
        jax.tree.map(testing.assert_bitwise, on_ranks, quantized)
        self.assertIn("expert", on_ranks[0].forward.values.sharding.spec[0])

        @nnx.jit
        def compute(layer, x, quantized):
            def loss(layer, x):
                y = layer(x, quantized_weights=quantized)[0]
                return (y * jnp.arange(size)).sum(), y

            gradients, y = nnx.grad(loss, argnums=(0, 1), has_aux=True)(layer, x)
            return y, gradients

        before, in_call = (compute(layer, x, given) for given in (quantized, None))
        # With a tensor axis the call has a scale per rank's part of a channel.
        compare = testing.assert_bitwise
        if recipe is ROWS and "tensor" in axes:
            compare = lambda a, b: self.assertLess(norm(a, b), 0.05)
        jax.tree.map(compare, before, in_call)

    def test_eight_bits_are_gathered(self):
        """The float matrices are not: only their gradients are scattered."""
        mesh = testing.mesh_of((2, 4), ("data", "expert"))
        options = dict(mesh=mesh, fsdp_axis="data", quantization=BLOCKS, rngs=nnx.Rngs(0))
        layer = jax_ep.nnx.MoE(256, 256, 4, 2, **options)
        quantized = quant.quantize_experts(layer.w_up[...], layer.w_down[...], BLOCKS)

        def gathered(given):
            loss = lambda layer, x: layer(x, quantized_weights=given)[0].sum()
            compute = jax.jit(nnx.grad(loss))
            text = compute.lower(layer, jnp.ones((8, 3, 256))).compile().as_text()
            return re.findall(r"= (\w+)\[1,(?:256|512),(?:2,)?256\]\S* all-gather\(", text)

        self.assertEqual(set(gathered(None)), {"f32"})
        self.assertEqual(set(gathered(quantized)), {"u8"})

    @parameterized.parameters(AxisType.Auto, AxisType.Explicit)
    def test_ranks_quantize_by_the_kernel(self, axis_type):
        """Outside of a shard_map it would be XLA, on CUDA."""
        mesh = testing.mesh_of((2, 4), ("data", "expert"), axis_type=axis_type)
        options = dict(mesh=mesh, fsdp_axis="data", quantization=BLOCKS, rngs=nnx.Rngs(0))
        layer = jax_ep.nnx.MoE(256, 256, 4, 2, **options)
        program = programs.lower_for_cuda(nnx.jit(lambda layer: layer.quantize_weights()), layer)
        self.assertEqual(program.targets, {"quantize_weights": 2})
        expected = quant.quantize_experts(layer.w_up[...], layer.w_down[...], BLOCKS)
        jax.tree.map(testing.assert_bitwise, layer.quantize_weights(), expected)

    @parameterized.parameters(BLOCKS, ROWS)
    def test_an_explicit_axis_shards_gate_and_up(self, recipe):
        found = []
        for axis_type in AxisType.Auto, AxisType.Explicit:
            mesh = testing.mesh_of((4, 2), ("expert", "tensor"), axis_type=axis_type)
            with jax.set_mesh(mesh):
                options = dict(tensor_axis="tensor", quantization=recipe, rngs=nnx.Rngs(0))
                layer = jax_ep.nnx.MoE(256, 256, 4, 2, **options)
                quantized = quant.quantize_experts(layer.w_up[...], layer.w_down[...], recipe)
                jax.tree.map(testing.assert_bitwise, layer.quantize_weights(), quantized)
                found.append(layer(jnp.ones((8, 256)), quantized_weights=quantized)[0])
        self.assertLess(norm(*found), 1e-3)

    def test_quantized_weights_may_be_a_list(self):
        """As a checkpoint that is read without a structure returns them."""
        mesh = testing.mesh_of((2, 4), ("data", "expert"))
        options = dict(mesh=mesh, fsdp_axis="data", quantization=ROWS, rngs=nnx.Rngs(0))
        layer = jax_ep.nnx.MoE(H, F, 8, 2, **options)
        quantized = layer.quantize_weights()
        call = lambda given: layer(jnp.ones((8, H)), quantized_weights=given)[0]
        testing.assert_bitwise(call(list(quantized)), call(quantized))

    def test_the_gradient_of_gathered_weights_is_refused(self):
        mesh = testing.mesh_of((2, 4), ("data", "expert"))
        options = dict(mesh=mesh, fsdp_axis="data", quantization=ROWS, rngs=nnx.Rngs(0))
        layer = jax_ep.nnx.MoE(H, F, 8, 2, **options)
        loss = lambda quantized: layer(jnp.ones((8, H)), quantized_weights=quantized)[0].sum()
        with self.assertRaisesRegex(jax_ep.UnavailableError, "quantized_weights are diff"):
            jax.grad(loss)(layer.quantize_weights())

    def test_a_layer_without_a_recipe(self):
        layer = jax_ep.nnx.MoE(H, F, 8, 2, mesh=testing.expert_mesh(), rngs=nnx.Rngs(0))
        with self.assertRaisesRegex(
            jax_ep.ArgumentError, "without a recipe; expected quantization"
        ):
            layer.quantize_weights()

    def test_blocks_lie_on_one_rank(self):
        mesh = testing.mesh_of((2, 4), ("data", "expert"))
        options = dict(mesh=mesh, fsdp_axis="data", quantization=BLOCKS, rngs=nnx.Rngs(0))
        layer = jax_ep.nnx.MoE(H, F, 8, 2, **options)
        quantized = quant.quantize_experts(layer.w_up[...], layer.w_down[...], BLOCKS)
        for call in (
            lambda: layer(jnp.ones((8, 1, H)), quantized_weights=quantized),
            layer.quantize_weights,
        ):
            with self.assertRaisesRegex(jax_ep.ArgumentError, "split hidden_size=144 over 2 ranks"):
                call()


if __name__ == "__main__":
    absltest.main()
