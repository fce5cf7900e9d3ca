"""Quantizing lowered for CUDA: a kernel wherever a device has its own rows or matrices, and nothing beside it."""

from __future__ import annotations

import functools

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from programs import fallback_warnings, lower_for_cuda, struct

import jax_ep
from jax_ep import quant

RANKS = testing.NUM_DEVICES


def quantize(x):
    return quant.quantize(x, quant.Fp8Block128())


class QuantizeLoweringTest(parameterized.TestCase):
    def test_call(self):
        format = quant.Fp8Row(jnp.float8_e5m2, scale_rounding="power_of_two")
        program = lower_for_cuda(
            lambda x: quant.quantize(x, format), struct((3, 16, 200), jnp.bfloat16)
        )
        call = program.call("quantize")
        self.assertEqual(call.operands, ("3x16x200xbf16",))
        self.assertEqual(call.results, ("3x16x200xf8E5M2", "3x16x1xf32"))
        self.assertEqual(
            call.attributes,
            {
                "scale_block": ("i64", 0),
                "is_e5m2": ("bool", True),
                "min_amax": ("f32", 1e-30),
                "power_of_two_scales": ("bool", True),
            },
        )
        self.assertEmpty(program.operations_on(3 * 16 * 200))

    def test_vmap_is_one_call(self):
        program = lower_for_cuda(jax.vmap(quantize, in_axes=1), struct((16, 3, 256)))
        self.assertEqual(program.call("quantize").operands, ("3x16x256xf32",))
        self.assertNotIn("stablehlo.while", program.text)

    def test_shard_map(self):
        f = testing.sharded(quantize, testing.expert_mesh())
        program = lower_for_cuda(f, struct((4 * RANKS, 256)))
        self.assertEqual(program.call("quantize").operands, ("4x256xf32",))

    @parameterized.parameters(AxisType.Auto, AxisType.Explicit)
    def test_xla_partitions_what_is_sharded(self, axis_type):
        """A custom call would gather all rows on every device."""
        mesh = testing.mesh_of((RANKS,), ("expert",), axis_type=axis_type)
        x = struct((4 * RANKS, 256), sharding=NamedSharding(mesh, P("expert")))
        with jax.set_mesh(mesh), fallback_warnings() as messages:
            self.assertEmpty(lower_for_cuda(quantize, x).targets)
        self.assertEmpty(messages)

    def test_implementation(self):
        x = struct((16, 256))
        of_xla = lambda x: quant.quantize(x, quant.Fp8Row(), implementation="xla")
        self.assertEmpty(lower_for_cuda(of_xla, x).targets)
        static = lambda x: quant.quantize(x, quant.Fp8Row(), scales=2.0)
        self.assertEmpty(lower_for_cuda(static, x).targets)
        of_cuda = lambda x: quant.quantize(x, quant.Fp8Row(), implementation="cuda")
        with self.assertRaisesRegex(jax_ep.UnavailableError, "lowered for cpu"):
            jax.jit(of_cuda).trace(x).lower(lowering_platforms=("cpu",))


FORWARD, BACKWARD = ("transposed",), ("as_given",)
BOTH = ("as_given", "transposed")
GROUPS, K, N = 2, 256, 384


def layouts(program):
    """The operands of each call that quantizes matrices, and the layouts that it is asked for."""
    calls = [call for call in program.calls if call.target == "jax_ep.quantize_weights.v1"]
    return sorted(
        (call.operands, tuple(name for name in BOTH if call.attributes[name][1])) for call in calls
    )


def matmul(lhs, rhs, **options):
    sizes = jnp.array([3, 5])
    options = {"quantization": quant.Recipe()} | options
    return jax_ep.grouped_matmul(lhs, rhs, sizes, **options)


def mlp(rows, up, down, **options):
    sizes = jnp.array([3, 5])
    options = {"activation": "swiglu", "quantization": quant.Recipe()} | options
    return jax_ep.grouped_mlp(rows, up, down, sizes, **options).astype(jnp.float32)


def loss(function, **options):
    return lambda *arguments: jnp.sum(jnp.square(function(*arguments, **options)))


class QuantizeWeightsLoweringTest(parameterized.TestCase):
    def test_call(self):
        format = quant.Fp8Block128("power_of_two")
        program = lower_for_cuda(
            lambda w: quant.quantize_weights(w, format), struct((2, 3, 130, 140), jnp.bfloat16)
        )
        call = program.call("quantize_weights")
        self.assertEqual(call.operands, ("2x3x130x140xbf16",))
        self.assertEqual(call.results, ("2x3x130x140xf8E4M3FN", "2x3x2x2xf32"))
        self.assertEqual(
            call.attributes,
            {
                "as_given": ("bool", True),
                "transposed": ("bool", False),
                "min_amax": ("f32", np.float32(1e-4)),
                "power_of_two_scales": ("bool", True),
            },
        )
        self.assertEmpty(program.operations_on(2 * 3 * 130 * 140))

    @parameterized.parameters(False, True)
    def test_for_training_is_one_call(self, transpose_rhs):
        program = lower_for_cuda(
            lambda w: quant.quantize_for_training(w, quant.Recipe(), transpose_rhs=transpose_rhs),
            struct((2, 130, 300)),
        )
        call = program.call("quantize_weights")
        as_given = ("2x130x300xf8E4M3FN", "2x2x3xf32")
        transposed = ("2x300x130xf8E4M3FN", "2x3x2xf32")
        self.assertEqual(call.results, (*as_given, *transposed))
        self.assertEmpty(program.operations_on(2 * 130 * 300))

    def test_gate_and_up_are_not_joined(self):
        pair, down = (struct((2, 130, 128)),) * 2, struct((2, 128, 130))
        quantize = functools.partial(quant.quantize_experts, quantization=quant.Recipe())
        program = lower_for_cuda(quantize, pair, down)
        expected = [(("2x128x130xf32",), BOTH), (("2x130x128xf32",) * 2, BOTH)]
        self.assertEqual(layouts(program), expected)
        self.assertEmpty(program.operations_on(2 * 130 * 128))
        # A partial block in the middle, and two dtypes, are beyond the kernel.
        partial = lower_for_cuda(quantize, (struct((2, 130, 100)),) * 2, struct((2, 100, 130)))
        self.assertIn((("2x130x200xf32",), BOTH), layouts(partial))
        mixed = pair[0], struct((2, 130, 128), jnp.bfloat16)
        self.assertIn((("2x130x256xf32",), BOTH), layouts(lower_for_cuda(quantize, mixed, down)))

    @parameterized.product(
        transpose_rhs=[False, True], dtype=[("f32", jnp.float32), ("bf16", jnp.bfloat16)]
    )
    def test_each_pass_of_a_matmul_asks_for_one_layout(self, transpose_rhs, dtype):
        name, dtype = dtype
        rows, columns = (N, K) if transpose_rhs else (K, N)
        lhs, rhs = struct((8, K), jnp.bfloat16), struct((GROUPS, rows, columns), dtype)
        operands = (f"{GROUPS}x{rows}x{columns}x{name}",)
        forward, backward = (BACKWARD, FORWARD) if transpose_rhs else (FORWARD, BACKWARD)
        call = functools.partial(matmul, transpose_rhs=transpose_rhs)
        program = lower_for_cuda(call, lhs, rhs)
        self.assertEqual(layouts(program), [(operands, forward)])
        self.assertEmpty(program.operations_on(GROUPS * K * N))
        both = lower_for_cuda(jax.grad(loss(call), argnums=(0, 1)), lhs, rhs)
        self.assertCountEqual(layouts(both), [(operands, forward), (operands, backward)])
        self.assertEmpty(both.operations_on(GROUPS * K * N))

    @parameterized.parameters(quant.Fp8Block128(), quant.Fp8Row())
    def test_cotangents_have_the_least_floor(self, format):
        options = dict(quantization=quant.Recipe(format))
        for call, operands, cotangents in (
            (matmul, (struct((8, K), jnp.bfloat16), struct((GROUPS, K, N))), 1),
            (
                mlp,
                (
                    struct((8, K), jnp.bfloat16),
                    struct((GROUPS, K, 2 * N)),
                    struct((GROUPS, N, K)),
                ),
                2,
            ),
        ):
            program = lower_for_cuda(jax.grad(loss(call, **options)), *operands)
            floors = [
                np.float32(call.attributes["min_amax"][1])
                for call in program.calls
                if "quantize.v1" in call.target
            ]
            least = np.float32(format.for_cotangents().min_amax)
            self.assertCountEqual(floors, [np.float32(format.min_amax), *[least] * cotangents])

    @parameterized.parameters("swiglu", "silu")
    def test_each_pass_of_an_mlp_asks_for_one_layout(self, activation):
        columns = 2 * N if activation == "swiglu" else N
        operands = (
            struct((8, K), jnp.bfloat16),
            struct((GROUPS, K, columns)),
            struct((GROUPS, N, K)),
        )
        up, down = (f"2x{K}x{columns}xf32",), (f"2x{N}x{K}xf32",)
        call = functools.partial(mlp, activation=activation)
        program = lower_for_cuda(call, *operands)
        self.assertCountEqual(layouts(program), [(up, FORWARD), (down, FORWARD)])
        self.assertEmpty(program.operations_on(GROUPS * K * N))
        both = lower_for_cuda(jax.grad(loss(call), argnums=(0, 1, 2)), *operands)
        self.assertCountEqual(
            layouts(both), [(w, layout) for w in (up, down) for layout in (FORWARD, BACKWARD)]
        )
        self.assertEmpty(both.operations_on(GROUPS * K * N))

    def test_weights_that_are_quantized_are_not_quantized_again(self):
        rows, up, down = struct((8, K), jnp.bfloat16), np.ones((2, K, 2 * N)), np.ones((2, N, K))
        quantized = quant.quantize_experts(up, down, quant.Recipe())
        call = lambda rows, q: jnp.sum(
            mlp(rows, jnp.asarray(up), jnp.asarray(down), quantized_weights=q)
        )
        self.assertEmpty(layouts(lower_for_cuda(jax.grad(call), rows, quantized)))

    def test_vmap_is_one_call(self):
        quantize = lambda w: quant.quantize_weights(w, quant.Fp8Block128())
        program = lower_for_cuda(jax.vmap(quantize, in_axes=1), struct((2, 3, 130, 140)))
        self.assertEqual(program.call("quantize_weights").operands, ("3x2x130x140xf32",))
        self.assertNotIn("stablehlo.while", program.text)

    def test_shard_map(self):
        quantize = lambda w: quant.quantize_for_training(w, quant.Recipe())
        f = testing.sharded(quantize, testing.expert_mesh())
        program = lower_for_cuda(f, struct((2 * RANKS, 130, 140)))
        self.assertEqual(layouts(program), [(("2x130x140xf32",), BOTH)])

    @parameterized.parameters(AxisType.Auto, AxisType.Explicit)
    def test_xla_partitions_what_is_sharded(self, axis_type):
        """A custom call would gather all matrices on every device."""
        mesh = testing.mesh_of((RANKS,), ("expert",), axis_type=axis_type)
        w = struct((2 * RANKS, 130, 140), sharding=NamedSharding(mesh, P("expert")))
        with jax.set_mesh(mesh), fallback_warnings() as messages:
            program = lower_for_cuda(lambda w: quant.quantize_for_training(w, quant.Recipe()), w)
        self.assertEmpty(program.targets)
        self.assertEmpty(messages)

    def test_implementation(self):
        w = struct((2, 130, 140))
        rows = quant.Recipe(quant.Fp8Row())
        for of_xla in (
            lambda w: quant.quantize_weights(w, quant.Fp8Block128(), implementation="xla"),
            lambda w: quant.quantize_for_training(w, quant.Recipe(), implementation="xla"),
            lambda w: quant.quantize_experts(w, w.mT, quant.Recipe(), implementation="xla"),
            lambda w: quant.quantize_weights(w, quant.Fp8Block128(), scales=2.0),
            lambda w: quant.quantize_for_training(w, rows),
            lambda w: matmul(jnp.ones((8, 130), jnp.bfloat16), w, implementation="xla"),
        ):
            self.assertEmpty(lower_for_cuda(of_xla, w).targets)
        of_cuda = lambda w: quant.quantize_weights(w, quant.Fp8Block128(), implementation="cuda")
        with self.assertRaisesRegex(jax_ep.UnavailableError, "lowered for cpu"):
            jax.jit(of_cuda).trace(w).lower(lowering_platforms=("cpu",))

    def test_a_dtype_without_a_kernel(self):
        with jax.enable_x64(True), fallback_warnings() as messages:
            w = struct((2, 130, 140), jnp.float64)
            quantize = lambda w: quant.quantize_weights(w, quant.Fp8Block128())
            self.assertEmpty(lower_for_cuda(quantize, w).targets)
        self.assertRegex(messages[0], "w is float64; the kernels take bfloat16")


if __name__ == "__main__":
    absltest.main()
