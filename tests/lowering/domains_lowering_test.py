"""Calls over NVLink domains, lowered for CUDA: what they pass to the kernels, and where these do not run."""

from __future__ import annotations

import functools
import unittest.mock

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from programs import fallback_warnings, lower_for_cuda, struct

import jax_ep
from jax_ep import quant
from jax_ep._src.core import runtime
from jax_ep._src.transfer import primitives

RANKS, SIZE = 8, 4
TOKENS, TOP_K, HIDDEN, ROWS = 16, 2, 64, 128
OPERATIONS = ("dispatch", "redispatch", "combine")
HOSTS = "the expert axis spans several hosts, which no network joins: JAX_EP_NETWORK is not set"


def arguments(num_devices=RANKS, num_tokens=TOKENS, hidden=HIDDEN):
    """ids, x, topk_weights of all ranks, as shapes."""
    tokens = num_devices * num_tokens
    return (
        struct((tokens, TOP_K), np.int32),
        struct((tokens, hidden), jnp.bfloat16),
        struct((tokens, TOP_K), np.float32),
    )


def transfers(ids, x, weights, size=SIZE, num_ranks=RANKS, implementations=(None,) * 3):
    first, again, back = implementations
    sent = jax_ep.dispatch(
        x,
        ids,
        weights,
        num_experts=2 * num_ranks,
        axis_name="expert",
        recv_capacity=ROWS,
        nvlink_domain_size=size,
        implementation=first,
    )
    rows = jax_ep.redispatch(2 * x, sent.plan, weights, implementation=again).rows
    return jax_ep.combine(rows + sent.rows, sent.plan, sent.row_weights, implementation=back)


def mapped(f=transfers, mesh=None, axes="expert"):
    mesh = mesh or testing.expert_mesh(RANKS)
    return jax.shard_map(f, mesh=mesh, in_specs=P(axes), out_specs=P(axes))


def on_hosts(host_of_index):
    """Pretends that devices are on several hosts, for the choice of an implementation."""
    return unittest.mock.patch.object(
        primitives, "host_of", lambda device: host_of_index(jax.devices().index(device))
    )


class CallsTest(parameterized.TestCase):
    def test_forward(self):
        program = lower_for_cuda(mapped(), *arguments())
        self.assertEqual(program.targets, dict.fromkeys(OPERATIONS, 1))
        forwarding = (f"{RANKS // SIZE}x{TOKENS}x1xui32", f"{ROWS}xi32")
        for operation in OPERATIONS:
            call = program.call(operation)
            self.assertEqual(call.attributes["domain_size"], ("i64", SIZE))
            arrays = call.results if operation == "dispatch" else call.operands
            index = arrays.index(forwarding[0])
            self.assertEqual(arrays[index : index + 2], forwarding)
            self.assertEqual(arrays[index - 1], "1xi32")  # the plan's status

    def test_backward(self):
        loss = lambda *a: jnp.sum(mapped()(*a).astype(jnp.float32))
        program = lower_for_cuda(jax.grad(loss, (1, 2)), *arguments())
        self.assertContainsSubset(OPERATIONS, program.targets)
        for call in program.calls:
            self.assertEqual(call.attributes["domain_size"], ("i64", SIZE))

    @parameterized.parameters(True, False)
    def test_weights_are_told_from_the_arrays_of_the_plan(self, has_weights):
        def f(ids, x, weights):
            given = weights if has_weights else None
            sent = jax_ep.dispatch(
                x, ids, given, num_experts=16, axis_name="expert", nvlink_domain_size=SIZE
            )
            return jax_ep.redispatch(2 * x, sent.plan, given).rows + sent.rows

        program = lower_for_cuda(mapped(f), *arguments())
        for operation in "dispatch", "redispatch":
            attributes = program.call(operation).attributes
            self.assertEqual(attributes["has_weights"], ("bool", has_weights))

    def test_one_level_has_no_such_attribute(self):
        """Older versions of jax_ep can run the program."""
        for size in None, RANKS:
            program = lower_for_cuda(mapped(functools.partial(transfers, size=size)), *arguments())
            for call in program.calls:
                self.assertNotIn("domain_size", call.attributes)

    def test_quantized_rows(self):
        def f(ids, x, weights):
            rows = quant.quantize(x, quant.Fp8Row())
            return jax_ep.dispatch(
                rows, ids, weights, num_experts=16, axis_name="expert", nvlink_domain_size=SIZE
            ).row_weights

        call = lower_for_cuda(mapped(f), *arguments()).call("dispatch")
        self.assertEqual(call.attributes["is_quantized"], ("bool", True))
        self.assertEqual(call.attributes["domain_size"], ("i64", SIZE))


class UnsupportedTest(parameterized.TestCase):
    @parameterized.parameters(
        ({"hidden": 1 << 18}, "a row of 524288 bytes, or 16 tokens per rank"),
        ({"num_tokens": 1 << 21}, "a row of 128 bytes, or 2097152 tokens per rank"),
        ({"num_devices": 65 * SIZE}, "the expert axis has 260 ranks; .* 256"),
        ({"num_devices": 128, "size": 1}, "there are 128 NVLink domains; .* 64"),
    )
    def test_shapes(self, sizes, reason):
        sizes = {"num_devices": RANKS, "size": SIZE} | sizes
        num_ranks, size = sizes["num_devices"], sizes.pop("size")
        mesh = AbstractMesh((num_ranks,), ("expert",), axis_types=(AxisType.Auto,))
        shapes = arguments(**sizes)
        f = functools.partial(transfers, size=size, num_ranks=num_ranks)
        with fallback_warnings() as messages:
            self.assertEmpty(lower_for_cuda(mapped(f, mesh), *shapes).calls)
        self.assertLen(messages, 1)
        self.assertRegex(messages[0], reason)
        for index in range(3):
            chosen = ["cuda" if i == index else "xla" for i in range(3)]
            refused = functools.partial(f, implementations=chosen)
            with self.assertRaisesRegex(NotImplementedError, reason):
                lower_for_cuda(mapped(refused, mesh), *shapes)

    def test_one_level_takes_them(self):
        one_level = functools.partial(transfers, size=None)
        self.assertLen(lower_for_cuda(mapped(one_level), *arguments(hidden=1 << 18)).calls, 3)


class HostsTest(parameterized.TestCase):
    @parameterized.parameters("argument", "context")
    def test_several_hosts_run_pure_jax(self, mesh_by):
        mesh = testing.expert_mesh(RANKS)
        if mesh_by == "argument":
            lower = lambda f: lower_for_cuda(mapped(f, mesh), *arguments())
        else:
            inside = lambda f: jax.shard_map(f, in_specs=P("expert"), out_specs=P("expert"))

            def lower(f):
                with jax.set_mesh(mesh):
                    return lower_for_cuda(inside(f), *arguments())

        with on_hosts(lambda index: index // SIZE), fallback_warnings() as messages:
            self.assertEmpty(lower(transfers).calls)
            self.assertEmpty(lower(jax.jit(transfers)).calls)
            for index in range(3):
                chosen = ["cuda" if i == index else "xla" for i in range(3)]
                refused = functools.partial(transfers, implementations=chosen)
                with self.assertRaisesRegex(NotImplementedError, HOSTS):
                    lower(refused)
        self.assertLen(messages, 1)
        self.assertIn(HOSTS, messages[0])

    def test_gradients(self):
        loss = lambda *a: jnp.sum(mapped()(*a).astype(jnp.float32))
        with on_hosts(lambda index: index // SIZE), fallback_warnings() as messages:
            self.assertEmpty(lower_for_cuda(jax.grad(loss, (1, 2)), *arguments()).calls)
        self.assertLen(messages, 1)

    @parameterized.parameters(
        ("rows of the mesh", (0, 0, 0, 0, 1, 1, 1, 1), 3),
        ("columns of the mesh", (0, 0, 1, 1, 0, 0, 1, 1), 0),
        ("one of the groups", (0, 0, 0, 0, 0, 0, 1, 1), 0),
    )
    def test_hosts_of_each_group_count(self, _, hosts, num_calls):
        """Groups of four ranks in two domains."""
        mesh = testing.mesh_of((2, 4), ("data", "expert"))
        f = functools.partial(transfers, size=2, num_ranks=4)
        with on_hosts(hosts.__getitem__), fallback_warnings() as messages:
            program = lower_for_cuda(mapped(f, mesh, ("data", "expert")), *arguments())
        self.assertLen(program.calls, num_calls)
        self.assertLen(messages, 0 if num_calls else 1)

    def test_a_network_joins_hosts(self):
        joined = unittest.mock.patch.object(runtime, "NETWORK_PROBLEM", None)
        with joined, on_hosts(lambda index: index // SIZE), fallback_warnings() as messages:
            self.assertLen(lower_for_cuda(mapped(), *arguments()).calls, 3)
        self.assertEmpty(messages)

    def test_a_network_that_is_chosen_and_missing_is_not_replaced(self):
        """Not by loads and stores either, on one host."""
        problem = "JAX_EP_NETWORK is 'ucx', and no luck"
        missing = unittest.mock.patch.object(runtime, "NETWORK_PROBLEM", problem)
        chosen = unittest.mock.patch.dict("os.environ", JAX_EP_NETWORK="ucx")
        with missing, chosen, fallback_warnings() as messages:
            self.assertEmpty(lower_for_cuda(mapped(), *arguments()).calls)
        self.assertIn(problem, messages[0])

    def test_one_level_is_left_to_the_runtime(self):
        """Its error names the domain size to give."""
        f = functools.partial(transfers, size=None)
        with on_hosts(lambda index: index // SIZE), fallback_warnings() as messages:
            self.assertLen(lower_for_cuda(mapped(f), *arguments()).calls, 3)
        self.assertEmpty(messages)

    def test_unknown_devices_are_taken_to_be_of_one_host(self):
        mesh = AbstractMesh((RANKS,), ("expert",), axis_types=(AxisType.Auto,))
        with on_hosts(lambda index: index // SIZE), fallback_warnings() as messages:
            self.assertLen(lower_for_cuda(mapped(mesh=mesh), *arguments()).calls, 3)
        self.assertEmpty(messages)


if __name__ == "__main__":
    absltest.main()
