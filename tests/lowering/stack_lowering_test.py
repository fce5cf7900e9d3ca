"""A scan over a stack of layers: the kernels read and write the stacks, and nothing else does."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from layer_stack import LARGE, NUM_LAYERS, NUM_LOCAL, SMALL, F, H, arguments, gradients, scanned
from programs import lower_for_cuda, struct

from jax_ep.nnx import MoE

NUM_GROUPS = NUM_LAYERS * NUM_LOCAL
FORMS = "chained", "checkpointed", "module"
UP, DOWN = f"{NUM_GROUPS}x{H}x{2 * F}x", f"{NUM_GROUPS}x{F}x{H}x"


def bfloat16_arguments():
    dtypes = jnp.bfloat16, np.int32, np.float32, jnp.bfloat16, jnp.bfloat16
    return [struct(a.shape, dtype) for a, dtype in zip(arguments(), dtypes, strict=True)]


def module_step():
    """The gradients of a stacked module, and its float32 parameters and bfloat16 tokens."""
    mesh = testing.mesh_of((SMALL, LARGE), ("data", "expert"))
    make = nnx.vmap(
        lambda key: MoE(H, F, NUM_LOCAL * LARGE, 2, mesh=mesh, rngs=nnx.Rngs(key)),
        transform_metadata={nnx.PARTITION_NAME: None},
    )
    layers = nnx.eval_shape(lambda: make(jax.random.split(jax.random.key(0), NUM_LAYERS)))
    definition, state = nnx.split(layers)

    def loss(state, x):
        moe, sums = nnx.merge(definition, state).stack(x)

        def block(carry, layer):
            x, sums = carry
            y, stats, sums = moe(x, layer, sums)
            return (x + y, sums), stats.aux_loss

        (x, _), losses = jax.lax.scan(block, (x, sums), jnp.arange(NUM_LAYERS))
        return jnp.sin(x.astype(jnp.float32)).sum() + losses.sum()

    specs = {"router_kernel": P(), "w_up": P(None, "expert"), "w_down": P(None, "expert")}
    given = {
        name: jax.ShapeDtypeStruct(state[name].shape, jnp.float32, sharding=NamedSharding(mesh, s))
        for name, s in specs.items()
    }
    tokens = NamedSharding(mesh, P(("data", "expert")))
    x = jax.ShapeDtypeStruct((4 * testing.NUM_DEVICES, H), jnp.bfloat16, sharding=tokens)

    def step(arrays, x):
        values = jax.tree.unflatten(jax.tree.structure(state), [arrays[k] for k in sorted(arrays)])
        return jax.grad(loss, argnums=(0, 1))(values, x)

    return step, given, x


def touching_stacks(form: str) -> list[str]:
    """The operations of a compiled training step whose result is a stack, but for views of one."""
    if form == "module":
        program = lower_for_cuda(*module_step())
    else:
        program = lower_for_cuda(gradients(scanned(form)), *bfloat16_arguments())
    text = program.partitioned()
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
        """Two accumulators are filled, and two stacks cast, outside of the loop. Nothing is copied."""
        # In its own process, because handlers cannot be taken back.
        command = [sys.executable, __file__, "--compile"]
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        found = json.loads(result.stdout)
        for form in FORMS:
            self.assertCountEqual(found[form], ["custom-call"] * 2 + ["fusion"] * 4, form)


if __name__ == "__main__":
    if "--compile" in sys.argv:
        print(json.dumps({form: touching_stacks(form) for form in FORMS}))
    else:
        absltest.main()
