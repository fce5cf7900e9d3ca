"""A scan over a stack of layers: the kernels read and write the stacks, and nothing else does."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import testing  # isort: skip  # noqa: F401  sets the devices

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest
from layer_stack import NUM_LAYERS, NUM_LOCAL, F, H, arguments, gradients, scanned
from programs import lower_for_cuda, struct

NUM_GROUPS = NUM_LAYERS * NUM_LOCAL
UP, DOWN = f"{NUM_GROUPS}x{H}x{2 * F}x", f"{NUM_GROUPS}x{F}x{H}x"


def bfloat16_arguments():
    dtypes = jnp.bfloat16, np.int32, np.float32, jnp.bfloat16, jnp.bfloat16
    return [struct(a.shape, dtype) for a, dtype in zip(arguments(), dtypes, strict=True)]


def touching_stacks(form: str) -> list[str]:
    """The operations of a compiled training step whose result is a stack, but for views of one."""
    text = lower_for_cuda(gradients(scanned(form)), *bfloat16_arguments()).partitioned()
    leading = f"{NUM_GROUPS}|{NUM_LAYERS},{NUM_LOCAL}"
    stack = rf"({leading}),({H},{2 * F}|{H},2,{F}|{F},{H})"
    views = {"parameter", "get-tuple-element", "bitcast"}
    computations = re.split(r"\n(?=%|ENTRY)", text)
    outside_of_fusions = [c for c in computations if not re.match(r"%(fused|wrapped)_", c)]
    found = re.findall(rf" = \w+\[{stack}\]\S* ([\w-]+)\(", "\n".join(outside_of_fusions))
    return [name for *_, name in found if name not in views]


class ProgramTest(absltest.TestCase):
    def test_the_kernels_read_stacks(self):
        program = lower_for_cuda(scanned("indexed"), *arguments())
        self.assertLessEqual(program.operations_on(NUM_GROUPS * F * H), {"while"})
        matrices = [c.operands[1] for c in program.calls if "matmul" in c.target]
        self.assertEqual(matrices, [f"{UP}f32", f"{DOWN}f32"])

    def test_gradients_are_added_in_place(self):
        program = lower_for_cuda(gradients(scanned("chained")), *bfloat16_arguments())
        calls = [c for c in program.calls if c.target == "jax_ep.grouped_matmul_rhs_gradient.v1"]
        self.assertEqual([c.results[0] for c in calls], [f"{UP}f32", f"{DOWN}f32"])
        self.assertEqual([c.aliases for c in calls], [{3: 0}] * 2)

    def test_no_residual_is_a_stack_per_layer(self):
        for form in "indexed", "chained":
            jaxpr = str(jax.make_jaxpr(gradients(scanned(form)))(*arguments()))
            self.assertNotRegex(jaxpr, rf"\[{NUM_LAYERS},{NUM_GROUPS},{H},")

    def test_nothing_else_touches_a_stack(self):
        """Each accumulator is filled once and cast once, outside of the loop. Nothing is copied."""
        # In its own process, because handlers cannot be taken back.
        command = [sys.executable, __file__, "--compile"]
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        found = json.loads(result.stdout)
        for form in "chained", "checkpointed":
            self.assertCountEqual(found[form], ["custom-call"] * 2 + ["fusion"] * 4, form)


if __name__ == "__main__":
    if "--compile" in sys.argv:
        print(json.dumps({form: touching_stacks(form) for form in ("chained", "checkpointed")}))
    else:
        absltest.main()
