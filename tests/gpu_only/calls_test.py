"""On GPUs the compiled programs call jax_ep's kernels: every operation, forward and backward, and nothing in their place."""

from __future__ import annotations

import os

import testing  # isort: skip

import cuda_programs
import jax
import jax.numpy as jnp
import numpy as np
import tier
from absl.testing import absltest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jax_ep
import jax_ep.nnx

MESH = testing.expert_mesh()
FORWARD = {"dispatch": 1, "grouped_matmul": 1, "combine": 1}
LAYER_AND_GRADIENTS = FORWARD | {
    "combine": 2,  # the layer's, and dispatch's gradient
    "redispatch": 1,
    "grouped_matmul": 2,
    "grouped_matmul_rhs_gradient": 1,
}


def layer(*arguments, **options):
    f = lambda *arguments: testing.expert_layer(*arguments, **options)
    return jax.shard_map(f, mesh=MESH, in_specs=P("expert"), out_specs=P("expert"))(*arguments)


def targets(f, *arguments):
    return cuda_programs.targets(jax.jit(f).lower(*arguments).compile())


class CallsTest(absltest.TestCase):
    def test_the_environment_is_the_tiers(self):
        self.assertEqual(os.environ["JAX_EP_IMPLEMENTATION"], "cuda")
        self.assertEqual(jax.device_count(), tier.NUM_GPUS)
        self.assertTrue(jax_ep.build_info()["cuda"])

    def test_forward(self):
        self.assertEqual(targets(layer, *testing.layer_arguments()), FORWARD)

    def test_forward_and_backward(self):
        def f(*arguments):
            out, backward = jax.vjp(lambda *floats: layer(arguments[0], *floats), *arguments[1:])
            return out, backward(jnp.sin(out))

        self.assertEqual(targets(f, *testing.layer_arguments()), LAYER_AND_GRADIENTS)

    def test_eager(self):
        """Outside jit each operation is a program of its own, and runs by its kernel as well."""
        arguments = testing.layer_arguments()
        testing.assert_close(layer(*arguments), testing.dense_layer(*arguments), steps=64)

    def test_nnx_layer(self):
        with jax.set_mesh(MESH):
            graph, state = nnx.split(jax_ep.nnx.MoE(32, 24, 8, 2, rngs=nnx.Rngs(0)))
            x = jnp.ones((16, 32))
            found = targets(lambda state, x: nnx.merge(graph, state)(x), state, x)
        self.assertEqual(found, {"dispatch": 1, "grouped_matmul_activation": 2, "combine": 1})

    def test_the_other_implementation_calls_none(self):
        def f(ids, x):
            sent = jax_ep.dispatch(
                x, ids, None, num_experts=tier.NUM_GPUS, axis_name="expert", implementation="xla"
            )
            return jax_ep.combine(sent.rows, sent.plan, None, implementation="xla")

        f = jax.shard_map(f, mesh=MESH, in_specs=P("expert"), out_specs=P("expert"))
        ids, x, *_ = testing.layer_arguments()
        self.assertEmpty(targets(f, ids, x))
        weight = ((ids >= 0) & (ids < tier.NUM_GPUS)).sum(1, keepdims=True)
        testing.assert_close(jax.jit(f)(ids, x), (weight * x).astype(np.float32))


if __name__ == "__main__":
    absltest.main()
