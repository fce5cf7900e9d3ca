"""jax.export and ahead-of-time compilation: for CUDA from a machine without one, and for here and now."""

from __future__ import annotations

import testing  # isort: skip

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import programs
from absl.testing import absltest, parameterized
from flax import nnx
from jax.sharding import PartitionSpec as P
from programs import struct

import jax_ep
import jax_ep.nnx
from jax_ep import quant

TARGETS = (
    "jax_ep.dispatch.v1",
    "jax_ep.redispatch.v1",
    "jax_ep.combine.v1",
    "jax_ep.dispatch_start.v1",
    "jax_ep.redispatch_start.v1",
    "jax_ep.combine_start.v1",
    "jax_ep.transfer_done.v1",
    "jax_ep.grouped_matmul.v1",
    "jax_ep.grouped_matmul_rhs_gradient.v1",
    "jax_ep.grouped_matmul_quantized.v1",
    "jax_ep.grouped_matmul_quantized_activation.v1",
    "jax_ep.grouped_matmul_activation.v1",
    "jax_ep.grouped_matmul_activation_gradient.v1",
    "jax_ep.quantize.v1",
    "jax_ep.quantize_weights.v1",
    "jax_ep.quantize_transposed.v1",
    "jax_ep.quantize_both.v1",
    "jax_ep.quantize_activation_gradient.v1",
    "jax_ep.grouped_matmul_quantized_rhs_gradient.v1",
    "jax_ep.grouped_matmul_mxfp4.v1",
    "jax_ep.grouped_matmul_mxfp4_activation.v1",
    "jax_ep.grouped_matmul_mxfp4_lhs_gradient.v1",
)


def quantized_matmul():
    lhs = quant.quantize(jnp.ones((8, 16)), quant.Fp8Row())
    rhs = quant.quantize_weights(jnp.ones((2, 16, 8)), quant.Fp8Row())
    return jax_ep.grouped_matmul(lhs, rhs, jnp.array([3, 5]), preferred_element_type=jnp.float32)


def quantized_mlp(rows, recipe):
    up, down = jnp.ones((2, 16, 2, 128)), jnp.ones((2, 128, 16))
    rows, up, down = (a.astype(jnp.bfloat16) for a in (rows, up, down))
    return jax_ep.grouped_mlp(
        rows, up, down, jnp.array([3, 5]), activation="swiglu", quantization=recipe
    )


def quantized_gradient():
    recipe = quant.Recipe(quantized_weight_gradients=True)

    def multiply(lhs, rhs):
        return jax_ep.grouped_matmul(lhs, rhs, jnp.array([3, 5]), quantization=recipe).sum()

    gradients = jax.grad(multiply, (0, 1))(jnp.ones((8, 16)), jnp.ones((2, 16, 16)))
    of_mlp = jax.grad(lambda *arguments: jnp.sum(quantized_mlp(*arguments, recipe)))
    return sum(map(jnp.sum, (*gradients, of_mlp(jnp.ones((8, 16))))))


def four_bit_mlp():
    recipe = quant.WeightsOnly(quant.MxFp4())
    quantized = quant.quantize_experts(jnp.ones((2, 32, 2, 32)), jnp.ones((2, 32, 32)), recipe)
    rows = jnp.ones((4096, 32), jnp.bfloat16)  # fewer have no epilogues
    mlp = lambda rows: jax_ep.grouped_mlp(
        rows, None, None, jnp.array([3, 5]), quantization=recipe, quantized_weights=quantized
    )
    y, pull = jax.vjp(mlp, rows)
    return y + pull(y)[0]


def in_flight(ids, x, topk_weights):
    sending = jax_ep.dispatch_start(
        x, ids, topk_weights, num_experts=2 * testing.NUM_DEVICES, axis_name="expert"
    )
    sent = jax_ep.dispatch_done(sending)
    return jax_ep.combine_done(jax_ep.combine_start(sent.rows, sent.plan, sent.row_weights))


def loss_and_gradients(*arguments):
    """Uses every target."""

    def two_layers(ids, x, topk_weights, matrices):
        x = testing.expert_layer(ids, x, topk_weights, matrices)
        x += in_flight(ids, x, topk_weights)
        x += quant.fake_quantize(x, quant.Fp8Block128()) + jnp.mean(
            quantized_mlp(jnp.ones((8, 16)), quant.Recipe())
        ).astype(x.dtype)
        return jax_ep.moe_mlp(
            x, ids, topk_weights, matrices, matrices, axis_name="expert", activation="silu"
        )[0]

    layer = jax.shard_map(
        two_layers,
        mesh=testing.expert_mesh(),
        in_specs=P("expert"),
        out_specs=P("expert"),
    )
    loss = lambda *arguments: (
        jnp.sum(jnp.sin(layer(*arguments)))
        + jnp.sum(quantized_matmul() + jnp.sum(four_bit_mlp()) + jnp.sum(quantized_gradient()))
    )
    return jax.value_and_grad(loss, (1, 2, 3))(*arguments)


def shapes():
    return [struct(a.shape, a.dtype) for a in testing.layer_arguments()]


class ExportTest(parameterized.TestCase):
    def test_targets_are_a_compatibility_surface(self):
        names = [str(check) for check in jax_ep.export_checks()]
        self.assertLen(names, len(TARGETS))
        for target in TARGETS:
            self.assertTrue(any(target in name for name in names), target)

    def test_for_cuda(self):
        with testing.pretend_cuda_build():
            export = jax.export.export(
                jax.jit(loss_and_gradients),
                platforms=["cuda"],
                disabled_checks=jax_ep.export_checks(),
            )
            exported = export(*shapes())
        self.assertEqual(exported.platforms, ("cuda",))
        self.assertEqual(exported.nr_devices, testing.NUM_DEVICES)
        restored = jax.export.deserialize(exported.serialize())
        for target in TARGETS:
            self.assertIn(target, restored.mlir_module())

    def test_the_checks_are_needed_and_suffice(self):
        with testing.pretend_cuda_build(), self.assertRaisesRegex(ValueError, "jax_ep.*v1"):
            jax.export.export(jax.jit(lambda *a: loss_and_gradients(*a)), platforms=["cuda"])(
                *shapes()
            )

    def test_here(self):
        """An artefact for this platform runs, and gives the same bits as the function."""
        platform = {"cpu": "cpu", "gpu": "cuda"}[jax.default_backend()]
        f = jax.jit(loss_and_gradients)
        exported = jax.export.export(
            f, platforms=[platform], disabled_checks=jax_ep.export_checks()
        )(*shapes())
        restored = jax.export.deserialize(exported.serialize())
        for seed in range(2):
            arguments = testing.layer_arguments(seed=seed)
            placed = [
                jax.device_put(a, jax.NamedSharding(testing.expert_mesh(), P("expert")))
                for a in arguments
            ]
            got, expected = jax.jit(restored.call)(*placed), f(*placed)
            jax.tree.map(testing.assert_bitwise, got, expected)

    def test_pytrees_are_written(self):
        """Each class of a pytree that a program may take or return, with its static fields."""
        rows = [
            quant.quantize(np.ones((2, 8), np.float32), format)
            for format in (
                quant.Fp8Block128("power_of_two"),
                quant.Fp8Row(jnp.float8_e5m2, "power_of_two"),
                quant.Fp8Block128().for_cotangents(),
            )
        ]
        weights = quant.quantize_for_training(np.ones((1, 8, 8), np.float32), quant.Recipe())
        sums = jax_ep.accumulators(np.ones((1, 8, 8)), np.ones((1, 8, 8)))

        def layer(x):
            routing = jax_ep.routing.softmax_topk(x, 1)
            options = {"axis_name": ("data", "expert"), "num_experts": 8}
            dispatched = jax_ep.dispatch(x, *routing[:2], row_align=2, **options)
            matrices = jnp.ones((8 // dispatched.plan.num_ranks, 8, 8))
            y, stats = jax_ep.moe_mlp(
                x, *routing[:2], matrices, matrices, activation="silu", **options
            )
            return y, routing, dispatched, stats

        mesh = testing.mesh_of((1, 1), ("data", "expert"))
        ranks = P(("data", "expert"))
        mapped = jax.shard_map(layer, mesh=mesh, in_specs=ranks, out_specs=ranks)
        with jax.set_mesh(mesh):
            moe = jax_ep.nnx.MoE(8, 4, 2, 1, rngs=nnx.Rngs(0))
            function = jax.jit(lambda given, x: (given, mapped(x), moe(x)))
            given, x = (rows, weights, sums), jnp.ones((2, 8))
            export = jax.export.export(function, disabled_checks=jax_ep.export_checks())
            exported = export(given, x)
            restored = jax.export.deserialize(exported.serialize())
            self.assertEqual(restored.in_tree, exported.in_tree)
            self.assertEqual(restored.out_tree, exported.out_tree)
            self.assertEqual(
                jax.tree.structure(restored.call(given, x)),
                jax.tree.structure(function(given, x)),
            )

    def test_for_both_platforms(self):
        """XLA compiles all of a program: for CPUs it finds no custom call of CUDA, or aborts."""
        for implementation in (None, "xla"):
            f = lambda x, n, i=implementation: jax_ep.grouped_matmul(
                x, x[None], n, implementation=i
            )
            export = jax.export.export(
                jax.jit(f), platforms=["cpu", "cuda"], disabled_checks=jax_ep.export_checks()
            )
            with (
                testing.pretend_cuda_build(),
                self.assertRaisesRegex(jax_ep.UnavailableError, "cpu and cuda; expected one"),
            ):
                export(struct((8, 8)), struct((1,), np.int32))


class AheadOfTimeTest(parameterized.TestCase):
    def test_compiled_once_called_often(self):
        f = jax.jit(loss_and_gradients)
        compiled = f.lower(*shapes()).compile()
        for seed in range(2):
            arguments = testing.layer_arguments(seed=seed)
            placed = [
                jax.device_put(a, s)
                for a, s in zip(arguments, compiled.input_shardings[0], strict=True)
            ]
            value, _ = compiled(*placed)
            expected, _ = f(*arguments)
            testing.assert_close(value, np.asarray(expected))

    def test_lowered_text_is_the_same_every_time(self):
        """No addresses, counters or process ids: compilation caches of all processes agree."""
        texts = {programs.lower_for_cuda(loss_and_gradients, *shapes()).text for _ in range(2)}
        self.assertLen(texts, 1)


if __name__ == "__main__":
    absltest.main()
