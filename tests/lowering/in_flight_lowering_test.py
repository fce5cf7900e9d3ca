"""Transfers in flight, lowered for CUDA: a call that starts each, and one that joins it with the same arrays."""

from __future__ import annotations

import functools

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax.sharding import PartitionSpec as P
from programs import fallback_warnings, lower_for_cuda, struct

import jax_ep

RANKS, TOKENS, TOP_K, HIDDEN = min(4, testing.NUM_DEVICES), 16, 2, 64


def arguments(hidden=HIDDEN):
    """ids, x, topk_weights of all ranks, as shapes."""
    tokens = RANKS * TOKENS
    return (
        struct((tokens, TOP_K), np.int32),
        struct((tokens, hidden), jnp.bfloat16),
        struct((tokens, TOP_K), np.float32),
    )


def transfers(ids, x, weights):
    sending = jax_ep.dispatch_start(
        x, ids, weights, num_experts=2 * RANKS, axis_name="expert", lane=2, num_sms=16
    )
    sending, beside = jax_ep.overlap(sending, jnp.tanh, x)
    sent = jax_ep.dispatch_done(sending)
    returning = jax_ep.combine_start(sent.rows, sent.plan, sent.row_weights)
    return jax_ep.combine_done(returning) + beside


def lower(f=transfers, hidden=HIDDEN):
    mesh = testing.expert_mesh(RANKS)
    mapped = jax.shard_map(f, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))
    return lower_for_cuda(mapped, *arguments(hidden))


def out_and_gradients(ids, x, weights):
    out, backward = jax.vjp(lambda *a: transfers(ids, *a), x, weights)
    return out, backward(x)


class CallsTest(parameterized.TestCase):
    def test_forward(self):
        program = lower()
        self.assertEqual(
            program.targets, {"dispatch_start": 1, "combine_start": 1, "transfer_done": 2}
        )
        start = program.call("dispatch_start")
        for name, value in {"lane": 2, "num_lanes": 4, "num_sms": 16}.items():
            self.assertEqual(start.attributes[name], ("i64", value))
        self.assertEqual(program.call("combine_start").attributes["lane"], ("i64", 1))

    def test_few_sms_over_domains(self):
        def f(ids, x, weights, num_sms=None):
            sending = jax_ep.dispatch_start(
                x, ids, weights, num_experts=2 * RANKS, axis_name="expert",
                nvlink_domain_size=RANKS // 2, num_sms=num_sms,
            )  # fmt: skip
            return jax_ep.dispatch_done(sending).row_weights

        for given, expected in ((None, 16), (8, 8), (32, 16)):
            start = lower(functools.partial(f, num_sms=given)).call("dispatch_start")
            self.assertEqual(start.attributes["num_sms"], ("i64", expected))

    def test_done_has_all_arrays_of_its_start(self):
        """In the order of results and operands, of which the handlers compare the addresses."""
        program = lower()
        starts = [call for call in program.calls if "start" in call.target]
        joins = [call for call in program.calls if "transfer_done" in call.target]
        for start, done in zip(starts, joins, strict=True):
            self.assertEqual(done.operands, (*start.results, *start.operands))
            count = 2 if "dispatch" in start.target else 1
            self.assertEqual(done.attributes["num_results"], ("i64", count))
            self.assertEqual(done.aliases, {index: index for index in range(count)})
            self.assertEqual(done.results, start.results[:count])

    def test_backward(self):
        program = lower(out_and_gradients)
        self.assertEqual(
            program.targets,
            {"dispatch_start": 1, "combine_start": 2, "redispatch_start": 1, "transfer_done": 4},
        )

    def test_layer_that_sends_again(self):
        def layer(ids, x, weights, up, down):
            def run(*floats):
                x, weights, up, down = floats
                return jax_ep.moe_mlp(
                    x, ids, weights, up, down, axis_name="expert", overlap=True, num_comm_sms=24
                )[0]

            out, backward = jax.vjp(run, x, weights, up, down)
            return backward(out)

        mapped = jax.shard_map(
            layer, mesh=testing.expert_mesh(RANKS), in_specs=P("expert"), out_specs=P("expert")
        )
        matrices = (
            struct((2 * RANKS, 64, 2, 64), jnp.bfloat16),
            struct((2 * RANKS, 64, 64), jnp.bfloat16),
        )
        program = lower_for_cuda(mapped, *arguments(), *matrices)
        transfers = {name: n for name, n in program.targets.items() if "matmul" not in name}
        self.assertEqual(
            transfers,
            {"dispatch": 1, "combine": 1, "redispatch": 1, "redispatch_start": 1, "combine_start": 1,
             "transfer_done": 2},
        )  # fmt: skip
        for name in ("redispatch_start", "combine_start"):
            self.assertEqual(program.call(name).attributes["num_sms"], ("i64", 24))

    def test_vmap_has_none_in_flight(self):
        def two(ids, x, weights):
            return jax.vmap(lambda x: transfers(ids, x, weights))(jnp.stack([x, x]))[0]

        self.assertEqual(lower(two).targets, {"dispatch": 1, "combine": 1})

    def test_what_has_no_kernel_is_not_joined(self):
        with fallback_warnings() as messages:
            program = lower(hidden=HIDDEN + 1)
        self.assertEqual(program.targets, {})
        self.assertTrue(any("rows are" in str(message) for message in messages))


if __name__ == "__main__":
    absltest.main()
