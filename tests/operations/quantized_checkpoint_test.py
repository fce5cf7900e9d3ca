"""Layers of a checkpoint in eight bits, which have no float matrices, against moe_mlp of the same arrays."""

from __future__ import annotations

import functools

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
import programs
import tier
from absl.testing import absltest, parameterized
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
import jax_ep.linen
import jax_ep.nnx
from jax_ep import quant

BLOCKS = quant.Recipe()
ROWS = quant.Recipe(quant.Fp8Row(), quant.Fp8Row(jnp.float8_e5m2))
H, F, EXPERTS, TOP_K = 144, 256, 8, 2  # blocks along H are partial
COUNTS = testing.rank_counts(1, 4)
OPTIONS = dict(quantization=BLOCKS, quantized_only=True)


@functools.cache
def checkpoint():
    """The tensors of each expert, [out, in], as DeepSeek-V3's files have them."""
    rng = np.random.default_rng(0)
    tensors = {}
    for e in range(EXPERTS):
        for name, shape in ("gate", (F, H)), ("up", (F, H)), ("down", (H, F)):
            w = quant.quantize_weights(rng.normal(size=shape).astype(np.float32), BLOCKS.weights)
            tensors[f"{e}.{name}.weight"] = np.asarray(w.values)
            tensors[f"{e}.{name}.weight_scale_inv"] = np.asarray(w.scales)
    return tensors


def stacked(name, xp=np):
    stack = lambda part: xp.stack([checkpoint()[f"{e}.{name}.{part}"] for e in range(EXPERTS)])
    return quant.Quantized(stack("weight"), stack("weight_scale_inv"), BLOCKS.weights)


def loaded(xp=np):
    gate, up, down = (stacked(name, xp) for name in ("gate", "up", "down"))
    return quant.experts_from_checkpoint((gate, up), down)


def on_mesh(mesh):
    return jax.device_put(loaded(), NamedSharding(mesh, P("expert")))


def tokens():
    return jax.random.normal(jax.random.key(1), (16, H))


def nnx_layer(**options):
    return jax_ep.nnx.MoE(H, F, EXPERTS, TOP_K, rngs=nnx.Rngs(0), **OPTIONS | options)


def linen_layer(**options):
    return jax_ep.linen.MoE(H, F, EXPERTS, TOP_K, **OPTIONS | options)


def with_floats(quantized):
    """Both layouts, and float matrices that nothing reads."""
    both = [quant.QuantizedWeights(one.forward, one.forward.mT) for one in quantized]
    floats = [jnp.full(one.backward.shape, jnp.nan) for one in both]
    return floats, tuple(both)


@functools.cache
def reference(mesh):
    """x, router_kernel, quantized -> y of moe_mlp."""

    def f(x, kernel, w_up, w_down, quantized):
        logits = jnp.dot(x, kernel, precision="highest")
        routed = jax_ep.routing.softmax_topk(logits, TOP_K)
        options = dict(quantization=BLOCKS, quantized_weights=quantized)
        return jax_ep.moe_mlp(
            x, routed.topk_ids, routed.topk_weights, w_up, w_down, axis_name="expert", **options
        )[0]

    specs = (P("expert"), P(), P("expert"), P("expert"), P("expert"))
    mapped = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=P("expert"))

    @jax.jit
    def compute(x, kernel, quantized):
        floats, both = with_floats(quantized)
        return mapped(x, kernel, *floats, both)

    return compute


class LoadTest(absltest.TestCase):
    def test_arrays_are_used_as_they_are(self):
        up, down = loaded()
        for layout, names, size in (up.forward, ("gate", "up"), F), (down.forward, ("down",), H):
            self.assertIsInstance(layout.values, np.ndarray)
            self.assertIsInstance(layout.scales, np.ndarray)
            for e in range(EXPERTS):
                for i, name in enumerate(names):
                    tensors = checkpoint()
                    values = layout.values[e, i * size : (i + 1) * size]
                    blocks = -(-size // 128)
                    scales = layout.scales[e, i * blocks : (i + 1) * blocks]
                    testing.assert_bitwise(values, tensors[f"{e}.{name}.weight"])
                    testing.assert_bitwise(scales, tensors[f"{e}.{name}.weight_scale_inv"])

    def test_under_jit_on_a_mesh(self):
        """Arrays stay with the ranks of their experts, and may be donated."""
        mesh = testing.expert_mesh(COUNTS[-1])
        sharding = NamedSharding(mesh, P("expert"))
        parts = jax.device_put([stacked(n) for n in ("gate", "up", "down")], sharding)
        join = jax.jit(
            lambda gate, up, down: quant.experts_from_checkpoint((gate, up), down),
            donate_argnums=(0, 1, 2),
        )
        program = join.lower(*parts).compile()
        self.assertNotIn("all-gather", program.as_text())
        found = join(*parts)
        self.assertTrue(found[0].forward.values.sharding.is_equivalent_to(sharding, 3))
        jax.tree.map(testing.assert_bitwise, found, loaded())

    def test_a_plain_activation_has_no_gate(self):
        up, _ = quant.experts_from_checkpoint(stacked("up"), stacked("down"))
        self.assertEqual(up.forward.shape, (EXPERTS, F, H))


class LayerTest(parameterized.TestCase):
    @parameterized.parameters((COUNTS[0], 2), (COUNTS[-1], 1))
    def test_the_bits_of_moe_mlp(self, num_ranks, num_chunks):
        mesh = testing.expert_mesh(num_ranks)
        quantized, x = on_mesh(mesh), tokens()
        options = dict(mesh=mesh, num_chunks=num_chunks)
        layer, module = nnx_layer(**options), linen_layer(**options)
        self.assertIsNone(layer.w_up)
        self.assertEqual(set(nnx.to_pure_dict(nnx.state(layer, nnx.Param))), {"router_kernel"})
        expected = reference(mesh)(x, layer.router_kernel[...], quantized)

        call = nnx.jit(lambda layer, x, quantized: layer(x, quantized_weights=quantized)[0])
        testing.assert_bitwise(call(layer, x, quantized), expected)
        testing.assert_bitwise(layer(x, quantized_weights=quantized)[0], expected)

        made = module.init(jax.random.key(0), x, quantized_weights=quantized)
        self.assertEqual(set(made["params"]), {"router_kernel"})
        variables = {"params": {"router_kernel": layer.router_kernel[...]}}
        apply = jax.jit(lambda v, x, q: module.apply(v, x, quantized_weights=q)[0])
        testing.assert_bitwise(apply(variables, x, quantized), expected)

    def test_a_compiled_call_takes_eight_bits_alone(self):
        mesh = testing.expert_mesh(COUNTS[-1])
        layer, quantized = nnx_layer(mesh=mesh), on_mesh(mesh)
        call = jax.jit(lambda x, quantized: layer(x, quantized_weights=quantized)[0])
        memory = call.lower(tokens(), quantized).compile().memory_analysis()
        bytes_of = lambda tree: sum(a.nbytes for a in jax.tree.leaves(tree))
        self.assertLess(
            memory.argument_size_in_bytes, 1.2 * bytes_of(quantized) / COUNTS[-1] + 20_000
        )

    @parameterized.parameters("nnx", "linen")
    def test_kernels_read_the_checkpoint(self, module):
        """On CUDA nothing quantizes, transposes or copies a matrix."""
        mesh = testing.expert_mesh(COUNTS[-1])
        layer = nnx_layer(mesh=mesh) if module == "nnx" else linen_layer(mesh=mesh)
        if module == "linen":
            params = {"router_kernel": jnp.ones((H, EXPERTS))}
            layer = functools.partial(layer.apply, {"params": params})
        call = lambda x, quantized: layer(x, quantized_weights=quantized)[0]
        x = tokens().astype(jnp.bfloat16)
        program = programs.lower_for_cuda(call, x, on_mesh(mesh))
        self.assertEqual(program.targets["quantize_weights"], 0)
        self.assertGreater(program.targets["grouped_matmul_quantized"], 0)
        self.assertEmpty(program.operations_on(EXPERTS // COUNTS[-1] * F * H))

    @tier.only_on_cpu
    @parameterized.parameters("fsdp", "tensor")
    def test_other_axes_shard_them(self, axis):
        mesh = testing.mesh_of((4, 2), ("expert", axis))
        size = dict(hidden_size=256, intermediate_size=256, num_experts=EXPERTS, top_k=TOP_K)
        options = size | {f"{axis}_axis": axis, "mesh": mesh, "quantization": BLOCKS}
        floats = jax_ep.nnx.MoE(**options, rngs=nnx.Rngs(0))
        both = floats.quantize_weights()
        forward = tuple(quant.QuantizedWeights(one.forward) for one in both)
        layer = jax_ep.nnx.MoE(**options, quantized_only=True, rngs=nnx.Rngs(0))
        layer.router_kernel[...] = floats.router_kernel[...]
        x = jax.random.normal(jax.random.key(1), (16, 256))

        @nnx.jit
        def compute(layer, x, quantized):
            loss = lambda x: jnp.sum(layer(x, quantized_weights=quantized)[0] ** 2)
            return jax.value_and_grad(loss)(x)

        jax.tree.map(testing.assert_bitwise, compute(layer, x, forward), compute(floats, x, both))


class GradientTest(parameterized.TestCase):
    @parameterized.parameters((None, 1), ("dispatch", 2), ("experts", 1))
    def test_of_rows_and_router(self, remat, num_chunks):
        """Frozen experts: blocks are transposed for the backward pass."""
        mesh = testing.expert_mesh(COUNTS[-1])
        quantized = on_mesh(mesh)
        layer = nnx_layer(mesh=mesh, remat=remat, num_chunks=num_chunks)

        @nnx.jit
        def found(layer, x, quantized):
            loss = lambda layer, x: jnp.sum(layer(x, quantized_weights=quantized)[0] ** 2)
            return nnx.grad(loss, argnums=(0, 1))(layer, x)

        of_layer, of_x = found(layer, tokens(), quantized)
        loss = lambda x, kernel: jnp.sum(reference(mesh)(x, kernel, quantized) ** 2)
        x_bar, kernel_bar = jax.jit(jax.grad(loss, argnums=(0, 1)))(
            tokens(), layer.router_kernel[...]
        )
        np.testing.assert_allclose(of_x, x_bar, rtol=1e-5, atol=1e-5 * np.abs(x_bar).max())
        np.testing.assert_allclose(
            of_layer["router_kernel"][...],
            kernel_bar,
            rtol=1e-5,
            atol=1e-5 * np.abs(kernel_bar).max(),
        )

    def test_of_quantized_weights_is_refused(self):
        mesh = testing.expert_mesh(COUNTS[-1])
        layer = nnx_layer(mesh=mesh)
        loss = lambda quantized: layer(tokens(), quantized_weights=quantized)[0].sum()
        with self.assertRaisesRegex(jax_ep.UnavailableError, "quantized_weights are diff"):
            jax.grad(loss)(on_mesh(mesh))

    def test_channels_lack_the_other_layout(self):
        w_up, w_down = (jnp.asarray(stacked(n).values, jnp.float32) for n in ("up", "down"))
        quantized = quant.quantize_experts(w_up.mT, w_down.mT, ROWS)
        forward = tuple(quant.QuantizedWeights(one.forward) for one in quantized)
        sizes = jnp.full(EXPERTS, 2, jnp.int32)

        def mlp(rows, matrices, quantized):
            options = dict(quantization=ROWS, quantized_weights=quantized, activation="relu2")
            return jax_ep.grouped_mlp(rows, *matrices, sizes, **options)

        expected = mlp(tokens(), (w_up.mT, w_down.mT), quantized)
        testing.assert_bitwise(mlp(tokens(), (None, None), forward), expected)
        gradient = jax.grad(lambda rows, given: mlp(rows, (None, None), given).sum())
        gradient(tokens(), quantized)
        with self.assertRaisesRegex(jax_ep.UnavailableError, "lack the layout backward"):
            gradient(tokens(), forward)

    def test_of_grouped_matmul(self):
        quantized = quant.QuantizedWeights(stacked("down").mT)
        rhs = quant.dequantize(quantized.forward.mT, jnp.float32)
        sizes = jnp.full(EXPERTS, 2, jnp.int32)
        both = quant.QuantizedWeights(quantized.forward, quantized.forward.mT)

        def loss(rows, given):
            out = jax_ep.grouped_matmul(rows, rhs, sizes, quantization=BLOCKS, quantized_rhs=given)
            return jnp.sum(out**2)

        found, expected = (jax.grad(loss)(tokens(), given) for given in (quantized, both))
        testing.assert_bitwise(found, expected)


if __name__ == "__main__":
    absltest.main()
