"""quantize lowered for CUDA: its kernel wherever a device has its own rows."""

from __future__ import annotations

import testing  # isort: skip

import jax
import jax.numpy as jnp
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


if __name__ == "__main__":
    absltest.main()
