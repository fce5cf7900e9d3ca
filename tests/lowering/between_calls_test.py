"""Lists what a compiled layer computes besides its custom calls: with bfloat16 weights, one sum of a float per row.

The programs are lowered for CUDA and compiled for this machine's CPU, which shows what XLA inserts between the calls:
casts, copies, transposes, pads and fills would all be here.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax.sharding import PartitionSpec as P
from programs import lower_for_cuda, struct

import jax_ep

T, K, H, F, L = 40, 2, 64, 256, 2
RANKS = min(2, testing.NUM_DEVICES)
M = RANKS * T * K
FREE = {"parameter", "constant", "get-tuple-element", "bitcast", "tuple", "custom-call"}
OPTIONS = {"default": {}, "remat=None": {"remat": None}, "capacity": {"capacity_factor": 1.25}}


def layers(num_layers: int = 1, **options):
    """Layers one after another: of one rank's ids, x, weights and expert weights."""

    def f(ids, x, topk_weights, w_up, w_down):
        for _ in range(num_layers):
            x, _ = jax_ep.moe_mlp(x, ids, topk_weights, w_up, w_down, axis_name="expert", **options)
        return x

    mesh = testing.expert_mesh(RANKS)
    return jax.shard_map(f, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))


def gradients(f):
    def both(out_bar, ids, *floats):
        out, backward = jax.vjp(lambda *floats: f(ids, *floats), *floats)
        return out, backward(out_bar)

    return both


def arguments(weight_dtype=jnp.bfloat16):
    """x again, which stands for the result's cotangent, and the arguments of a layer."""
    x = struct((RANKS * T, H), jnp.bfloat16)
    return (
        x,
        struct((RANKS * T, K), np.int32),
        x,
        struct((RANKS * T, K), np.float32),
        struct((RANKS * L, H, 2, F), weight_dtype),
        struct((RANKS * L, F, H), weight_dtype),
    )


def between_calls() -> dict[str, list[str]]:
    """The type and the operation of each instruction, by the name of the program."""
    programs = {"two layers": lower_for_cuda(layers(2), *arguments()[1:])}
    for name, options in OPTIONS.items():
        programs[f"forward, {name}"] = lower_for_cuda(layers(**options), *arguments()[1:])
        programs[f"both, {name}"] = lower_for_cuda(gradients(layers(**options)), *arguments())
    pair = lambda ids, x, weights, w_up, w_down: layers()(
        ids, x, weights, (w_up[:, :, 0], w_up[:, :, 1]), w_down
    )
    programs["a pair"] = lower_for_cuda(pair, *arguments()[1:])
    programs["both, float32"] = lower_for_cuda(gradients(layers()), *arguments(jnp.float32))
    return {name: instructions(program.partitioned()) for name, program in programs.items()}


def instructions(text: str) -> list[str]:
    found = re.findall(
        r"^ *(?:ROOT )?%?[\w.\-]+ = (\S+) ([\w\-]+)\(", text[text.index("ENTRY") :], re.M
    )
    return [f"{kind.partition('{')[0]} {name}" for kind, name in found if name not in FREE]


class BetweenCallsTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        # In its own process, because handlers cannot be taken back.
        command = [sys.executable, __file__, "--compile"]
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        cls.found = json.loads(result.stdout)

    @parameterized.parameters("two layers", *(f"forward, {name}" for name in OPTIONS))
    def test_forward_has_nothing(self, name):
        self.assertEqual(self.found[name], [])

    @parameterized.parameters(*OPTIONS)
    def test_backward_sums_row_dots(self, name):
        """Sums F / 128 floats per row, for the gradient of its routing weight."""
        (one,) = self.found[f"both, {name}"]
        self.assertRegex(one, rf"^f32\[{M}\] (fusion|reduce)$")

    def test_instructions_are_found(self):
        """Shows a cast as it would be found."""
        text = "HloModule m\nENTRY %e {\n  %p = bf16[8,2]{1,0} parameter(0)\n  ROOT %c = f32[8,2]{1,0} convert(%p)\n}"
        self.assertEqual(instructions(text), ["f32[8,2] convert"])

    def test_a_pair_of_gate_and_up_is_copied(self):
        """The conversion that docs/guides/checkpoints.md names avoids it."""
        self.assertTrue(any(f"bf16[{L},{H}," in one for one in self.found["a pair"]))

    def test_float32_weights_are_cast_once(self):
        """Forward and backward share the cast; there are enough rows per expert for one."""
        casts = [f"bf16[{L},{H},{2 * F}]", f"bf16[{L},{F},{H}]"]
        found = [one.split()[0] for one in self.found["both, float32"]]
        self.assertCountEqual(found, [*casts, f"f32[{M}]"])


if __name__ == "__main__":
    if "--compile" in sys.argv:
        print(json.dumps(between_calls()))
    else:
        absltest.main()
