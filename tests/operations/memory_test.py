"""jax_ep.memory: what a backward pass keeps, compared with the residuals of the derivative itself."""

from __future__ import annotations

import json
import math

import testing  # isort: skip
import tool  # isort: skip

import jax
import jax.numpy as jnp
from absl.testing import absltest, parameterized
from jax.sharding import PartitionSpec as P

import jax_ep

memory_table = tool.load("memory_table")
TOKENS, HIDDEN, INTERMEDIATE, TOP_K, LOCAL = 12, 40, 24, 3, 2
RANKS = testing.NUM_DEVICES


def residuals(dtype=jnp.bfloat16, activation="swiglu", **options) -> int:
    """The bytes of what `jax.vjp` keeps on one rank, without the weights."""
    found = []
    columns = INTERMEDIATE if activation == "relu" else 2 * INTERMEDIATE

    def layer(x, ids, topk_weights, w_up, w_down):
        def f(x, topk_weights, w_up, w_down):
            return jax_ep.moe_mlp(
                x, ids, topk_weights, w_up, w_down, axis_name="expert", activation=activation,
                **options,
            )[0]  # fmt: skip

        y, backward = jax.vjp(f, x, topk_weights, w_up, w_down)
        kept = {id(leaf): leaf for leaf in jax.tree.leaves(backward)}
        weights = {w_up.shape, w_down.shape}
        found.extend(leaf.aval for leaf in kept.values() if leaf.shape not in weights)
        return y

    arguments = (
        jax.ShapeDtypeStruct((TOKENS * RANKS, HIDDEN), dtype),
        jax.ShapeDtypeStruct((TOKENS * RANKS, TOP_K), jnp.int32),
        jax.ShapeDtypeStruct((TOKENS * RANKS, TOP_K), jnp.float32),
        jax.ShapeDtypeStruct((LOCAL * RANKS, HIDDEN, columns), dtype),
        jax.ShapeDtypeStruct((LOCAL * RANKS, INTERMEDIATE, HIDDEN), dtype),
    )
    mapped = jax.shard_map(
        layer, mesh=testing.expert_mesh(), in_specs=P("expert"), out_specs=P("expert")
    )
    jax.eval_shape(mapped, *arguments)
    return sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in found)


def memory(**options) -> jax_ep.Memory:
    return jax_ep.memory(TOKENS, HIDDEN, INTERMEDIATE, LOCAL * RANKS, TOP_K, RANKS, **options)


class ResidualsTest(parameterized.TestCase):
    @parameterized.parameters(
        {},
        {"remat": None},
        {"remat": "experts"},
        {"recv_capacity": 50},
        {"recv_capacity": 50, "num_chunks": 3, "remat": "experts"},
        {"num_chunks": 2},
        {"num_chunks": 3, "remat": None, "dtype": jnp.float32},
        {"activation": "relu"},
        {"activation": jax_ep.ClampedSwiGlu()},
        {"nvlink_domain_size": 1, "num_chunks": 2},
        {"overlap": True},
    )
    def test_are_those_of_the_derivative(self, **options):
        self.assertEqual(sum(memory(**options).residuals.values()), residuals(**options))


class SharedExpertTest(parameterized.TestCase):
    @parameterized.product(remat=[None, "dispatch", "experts"], num_chunks=[1, 2])
    def test_residuals(self, remat, num_chunks):
        shared = (jnp.ones((HIDDEN, 10), jnp.bfloat16), jnp.ones((10, HIDDEN), jnp.bfloat16))
        options = {"remat": remat, "activation": "relu", "num_chunks": num_chunks}
        got = memory(shared_intermediate_size=10, **options).residuals
        weights = 2 * 10 * HIDDEN * 2  # they are constants here
        expected = residuals(shared_expert=shared, **options) - weights
        self.assertEqual(sum(got.values()), expected)


class MemoryTest(absltest.TestCase):
    def test_results_are_those_of_the_operations(self):
        def run(x, ids, topk_weights):
            sent = jax_ep.dispatch(
                x, ids, topk_weights, num_experts=LOCAL * RANKS, axis_name="expert",
                recv_capacity=50,
            )  # fmt: skip
            return sent, jax_ep.combine(sent.rows, sent.plan, None)

        shapes = [(HIDDEN,), (TOP_K,), (TOP_K,)]
        dtypes = [jnp.bfloat16, jnp.int32, jnp.float32]
        arguments = [
            jax.ShapeDtypeStruct((TOKENS * RANKS, *shape), dtype)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
        mapped = jax.shard_map(
            run, mesh=testing.expert_mesh(), in_specs=P("expert"), out_specs=P("expert")
        )
        sent, out = jax.eval_shape(mapped, *arguments)
        nbytes = lambda tree: sum(
            math.prod(leaf.shape) * leaf.dtype.itemsize // RANKS for leaf in jax.tree.leaves(tree)
        )
        got = memory(recv_capacity=50)
        self.assertEqual(got.num_rows, 50)
        expected = {
            "rows": nbytes(sent.rows),
            "row_weights": nbytes(sent.row_weights),
            "plan": nbytes(sent.plan),
            "out": nbytes(out),
        }
        self.assertEqual(expected, {name: got.results[name] for name in expected})

    def test_a_capacity_is_what_saves(self):
        dropless = jax_ep.memory(4096, 7168, 2048, 256, 8, 64)
        factor = jax_ep.memory(4096, 7168, 2048, 256, 8, 64, capacity_factor=1.25)
        self.assertEqual(dropless.num_rows, 64 * 4096 * 4)
        self.assertEqual(factor.num_rows, 1.25 * 4096 * 8)
        ratio = sum(dropless.residuals.values()) / sum(factor.residuals.values())
        self.assertGreater(ratio, 15)

    def test_table_of_the_docs(self):
        """`python tools/docs/memory_table.py` writes it."""
        self.assertEqual(json.loads(memory_table.PATH.read_text()), memory_table.table())

    def test_workspace_over_domains(self):
        """The ring of a rail partner is the same for all shapes; it is no buffer of one level."""
        of = lambda tokens, size: (
            jax_ep.memory(tokens, 7168, 2048, 256, 8, 64, nvlink_domain_size=size).workspace
        )
        self.assertEqual(of(4096, 64), of(4096, None))
        self.assertNotIn("rails", of(4096, None))
        for size in 1, 2, 8, 32:
            self.assertEqual(set(of(4096, size)), {*of(4096, None), "rails"})
            self.assertLessEqual(sum(of(4096, size).values()), 2**30)
            self.assertEqual(of(4096, size)["rails"], of(128, size)["rails"])
        self.assertEqual(of(1 << 20, 8), {})  # more tokens than the kernels take

    def test_lanes_in_flight_have_workspaces(self):
        apart, beside = memory().workspace, memory(overlap=True).workspace
        self.assertEqual(beside, {name: 3 * size for name, size in apart.items()})

    def test_chunks_share_a_workspace(self):
        one = jax_ep.memory(TOKENS // 3, HIDDEN, INTERMEDIATE, LOCAL * RANKS, TOP_K, RANKS)
        self.assertEqual(memory(num_chunks=3).workspace, one.workspace)
        self.assertEqual(memory(num_chunks=3).results, one.results)


if __name__ == "__main__":
    absltest.main()
