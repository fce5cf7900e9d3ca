"""MLPs lowered for CUDA, without a GPU: their calls, forward and backward, and nothing else that costs."""

from __future__ import annotations

import functools
import itertools
import re

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax.sharding import PartitionSpec as P
from programs import fallback_warnings, lower_for_cuda, struct

import jax_ep

M, H, F, L = 96, 64, 32, 4
RANKS = testing.NUM_DEVICES
BF16, F32 = jnp.bfloat16, jnp.float32
FORWARD = {
    "activation": "swiglu",
    "has_bias": ("bool", False),
    "has_row_weights": ("bool", False),
    "keep_pre_activation": ("bool", False),
    "num_sms": ("i64", 0),
}


def mlp(sizes, rows, w_up, w_down, row_weights, b_up, b_down, **options):
    return jax_ep.grouped_mlp(
        rows, w_up, w_down, sizes, row_weights, b_up=b_up, b_down=b_down, **options
    )


def shapes(*, weights=True, biases=True, weight_dtype=BF16, num_rows=M):
    """group_sizes and the float arguments of `mlp`."""
    return (
        struct((L,), np.int32),
        struct((num_rows, H), BF16),
        struct((L, H, 2, F), weight_dtype),
        struct((L, F, H), weight_dtype),
        struct((num_rows,), F32) if weights else None,
        struct((L, 2, F), F32) if biases else None,
        struct((L, H), F32) if biases else None,
    )


def value_and_gradients(f):
    def run(sizes, *floats):
        y, backward = jax.vjp(lambda *floats: f(sizes, *floats), *floats)
        return y, backward(y)

    return run


class GroupedMlpTest(parameterized.TestCase):
    @parameterized.parameters(True, False)
    def test_forward(self, zero_tail):
        program = lower_for_cuda(functools.partial(mlp, zero_tail=zero_tail), *shapes())
        first, second = program.calls
        self.assertEqual(program.targets, {"grouped_matmul_activation": 2})
        self.assertEqual(first.attributes, FORWARD | {"has_bias": ("bool", True)})
        self.assertEqual(first.operands, ("96x64xbf16", "4x64x64xbf16", "4xi32", "4x64xf32"))
        self.assertEqual(first.results, ("96x32xbf16",))
        of_second = {
            "activation": "none",
            "has_bias": ("bool", True),
            "has_row_weights": ("bool", True),
        }
        self.assertEqual(second.attributes, FORWARD | of_second)
        self.assertEqual(
            second.operands, ("96x32xbf16", "4x32x64xbf16", "4xi32", "4x64xf32", "96xf32")
        )
        self.assertEqual(second.results, ("96x64xbf16",))
        # The epilogue leaves the tail unspecified: zeros cost one pass over the result.
        masking = {"select", "broadcast_in_dim"} if zero_tail else set()
        self.assertEqual(program.operations_on(M * H), masking)

    @parameterized.parameters(True, False)
    def test_zero_tail_of_the_gradient_of_rows(self, zero_tail):
        f = lambda *arguments: value_and_gradients(functools.partial(mlp, zero_tail=zero_tail))(
            *arguments
        )[1]
        program = lower_for_cuda(f, *shapes())
        tails = [
            call.attributes["zero_tail"][1]
            for call in program.calls
            if call.target == "jax_ep.grouped_matmul.v1" and call.results[0] == "96x64xbf16"
        ]
        self.assertEqual(tails, [zero_tail])

    @parameterized.parameters(True, False)
    def test_without_bias_and_weights_the_second_matmul_is_plain(self, zero_tail):
        f = functools.partial(mlp, num_sms=7, zero_tail=zero_tail)
        program = lower_for_cuda(f, *shapes(weights=False, biases=False))
        self.assertEqual(program.targets, {"grouped_matmul_activation": 1, "grouped_matmul": 1})
        call = program.call("grouped_matmul")
        self.assertEqual(call.attributes["zero_tail"], ("bool", zero_tail))
        self.assertEmpty(program.operations_on(M))
        for call in program.calls:
            self.assertEqual(call.attributes["num_sms"], ("i64", 7))

    @parameterized.product(weights=[False, True], biases=[False, True])
    def test_backward(self, weights, biases):
        f = value_and_gradients(functools.partial(mlp, zero_tail=False))
        program = lower_for_cuda(f, *shapes(weights=weights, biases=biases))
        expected = {
            "grouped_matmul_activation": 1 + (weights or biases),
            "grouped_matmul_activation_gradient": 1,
            "grouped_matmul": 1 + (not weights and not biases) + (weights and biases),
            "grouped_matmul_rhs_gradient": 2 + 2 * biases,
        }
        self.assertEqual(program.targets, expected)
        gradient = program.call("grouped_matmul_activation_gradient")
        flags = {
            "activation": "swiglu",
            "num_sms": ("i64", 0),
            "has_row_weights": ("bool", weights),
        }
        self.assertEqual(gradient.attributes, flags)
        operands = ("96x64xbf16", "4x32x64xbf16", "4xi32", "96x64xbf16")
        self.assertEqual(gradient.operands, (*operands, "96xf32") if weights else operands)
        self.assertEqual(gradient.results, ("96x64xbf16", "96x32xbf16", "96x1xf32"))
        first = program.calls[0]
        self.assertEqual(first.attributes["keep_pre_activation"], ("bool", True))
        self.assertEqual(first.results, ("96x32xbf16", "96x64xbf16"))
        self.assertEmpty(program.operations_on(M * F))

    @parameterized.parameters((4 * 64, False), (4 * 64 + 8, True))
    def test_float32_matrices_are_cast_where_there_are_many_rows(self, num_rows, cast):
        """From 64 rows per group on: the fast kernel reads 16 bits only. Gradients are float32 accumulators."""
        for f in (
            mlp,
            lambda sizes, rows, w, *_: jax_ep.grouped_matmul(rows, w.reshape(L, H, -1), sizes),
        ):
            arguments = shapes(weight_dtype=F32, num_rows=num_rows)
            program = lower_for_cuda(value_and_gradients(f), *arguments)
            converted = program.operations_on(L * H * F)
            self.assertEqual("convert" in converted, cast)
            short = "bf16" if cast else "f32"
            for call in program.calls:
                if "rhs_gradient" in call.target:
                    self.assertEndsWith(call.results[0], "xf32")
                elif "x8x" not in call.operands[1]:
                    self.assertEndsWith(call.operands[1], f"x{short}")

    def test_a_function_runs_between_plain_matmuls(self):
        function = lambda h: jnp.tanh(h[:, 0]) * h[:, 1]
        program = lower_for_cuda(
            functools.partial(mlp, activation=function), *shapes(weights=False, biases=False)
        )
        self.assertEqual(program.targets, {"grouped_matmul": 2})

    def test_an_activation_with_parameters_follows_the_matmul(self):
        """Biases and row weights stay in epilogues; without a warning, as there is nothing to change."""
        f = functools.partial(mlp, activation=jax_ep.ClampedSwiGlu())
        with fallback_warnings() as messages:
            program = lower_for_cuda(f, *shapes())
            self.assertEqual(program.targets, {"grouped_matmul_activation": 2})
            self.assertEqual(program.calls[0].attributes["activation"], "none")
            program = lower_for_cuda(value_and_gradients(f), *shapes(weights=False, biases=False))
        expected = {"grouped_matmul_activation": 1, "grouped_matmul": 3}
        self.assertEqual(program.targets, expected | {"grouped_matmul_rhs_gradient": 2})
        self.assertEmpty(messages)


class MoeMlpTest(parameterized.TestCase):
    def arguments(self):
        tokens, experts = 16 * RANKS, L * RANKS
        return (
            struct((tokens, 2), np.int32),
            struct((tokens, H), BF16),
            struct((tokens, 2), F32),
            struct((experts, H, 2, F), BF16),
            struct((experts, F, H), BF16),
        )

    def layer(self, **options):
        def f(ids, x, topk_weights, w_up, w_down):
            return jax_ep.moe_mlp(
                x, ids, topk_weights, w_up, w_down, axis_name="expert", **options
            )[0]

        mesh = testing.expert_mesh()
        return jax.shard_map(f, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))

    def test_forward(self):
        program = lower_for_cuda(self.layer(num_comm_sms=5), *self.arguments())
        expected = {"dispatch": 1, "grouped_matmul_activation": 2, "combine": 1}
        for call in program.calls:  # the limit is for transfers
            is_transfer = call.target in ("jax_ep.dispatch.v1", "jax_ep.combine.v1")
            self.assertEqual(call.attributes["num_sms"], ("i64", 5 if is_transfer else 0))
        self.assertEqual(program.targets, expected)
        self.assertEqual(program.call("dispatch").attributes["zero_tail"], ("bool", False))
        self.assertEmpty(program.operations_on(16 * H))

    @parameterized.parameters((None, 1), ("dispatch", 2))
    def test_backward(self, remat, redispatches):
        """combine's gradient is a redispatch, and so is remat. Large arrays see nothing but the calls."""
        program = lower_for_cuda(value_and_gradients(self.layer(remat=remat)), *self.arguments())
        expected = {
            "dispatch": 1,
            "redispatch": redispatches,
            "combine": 2,
            "grouped_matmul_activation": 2,
            "grouped_matmul_activation_gradient": 1,
            "grouped_matmul": 1,
            "grouped_matmul_rhs_gradient": 2,
        }
        self.assertEqual(program.targets, expected)
        self.assertEmpty(program.collectives())
        self.assertEmpty(program.operations_on(16 * H))

    @parameterized.parameters((None, 1), ("dispatch", 2))
    def test_backward_of_a_function(self, remat, redispatches):
        layer = self.layer(remat=remat, activation=lambda h: jnp.tanh(h[:, 0]) * h[:, 1])
        program = lower_for_cuda(value_and_gradients(layer), *self.arguments())
        expected = {
            "dispatch": 1,
            "redispatch": redispatches,
            "combine": 2,
            "grouped_matmul": 4,
            "grouped_matmul_rhs_gradient": 2,
        }
        self.assertEqual(program.targets, expected)

    @parameterized.product(
        num_chunks=[2, 4],
        remat=["dispatch", None],
        activation=["swiglu", lambda h: jnp.tanh(h[:, 0]) * h[:, 1]],
        weight_dtype=[BF16, F32],
    )
    def test_chunks_accumulate_in_the_kernels(self, num_chunks, remat, activation, weight_dtype):
        """No array of a matrix's shape is added: each chunk's call adds to the next chunk's result."""
        layer = self.layer(num_chunks=num_chunks, remat=remat, activation=activation)
        arguments = self.arguments()
        arguments = *arguments[:3], *(struct(w.shape, weight_dtype) for w in arguments[3:])
        program = lower_for_cuda(value_and_gradients(layer), *arguments)
        calls = [c for c in program.calls if "rhs_gradient" in c.target]
        self.assertLen(calls, 2 * num_chunks)
        matrices = [f"{L}x{H}x{2 * F}xf32", f"{L}x{F}x{H}xf32"]
        for matrix in matrices:
            chain = [call for call in calls if call.results == (matrix,)]
            self.assertLen(chain, num_chunks)
            first, *later = sorted(chain, key=lambda call: len(call.operands))
            self.assertEqual(first.attributes["has_accumulator"], ("bool", False))
            self.assertLen(first.operands, 3)
            for call in later:
                self.assertEqual(call.attributes["has_accumulator"], ("bool", True))
                self.assertEqual(call.operands[3:], (matrix,))
                self.assertEqual(call.aliases, {3: 0})
        # One cast at the end, unless the weights are float32.
        sizes = [f"{matrix[:-4]}x(?:f32|bf16)" for matrix in matrices]
        touching = re.findall(rf"stablehlo\.(\w+) .*tensor<(?:{'|'.join(sizes)})>", program.text)
        expected = {"custom_call"} if weight_dtype == F32 else {"custom_call", "convert"}
        self.assertEqual(set(touching) - {"reshape", "broadcast_in_dim"}, expected)
        self.assertEqual(touching.count("convert"), 0 if weight_dtype == F32 else 2)
        # Broadcasts make stand-ins for accumulators in the forward pass: nothing uses them.
        lines = program.text.splitlines()
        for index, line in enumerate(lines):
            if "broadcast_in_dim" in line and re.search("|".join(sizes), line):
                scope = itertools.takewhile(lambda line: "} :" not in line, lines[index + 1 :])
                name = re.escape(line.split()[0])
                self.assertNotRegex("\n".join(scope), rf"{name}\b")

    def test_a_shared_expert_is_not_sent(self):
        """It adds its own matmuls, over the rank's own tokens, and one addition."""
        shared = jnp.ones((H, 2, F), BF16), jnp.ones((F, H), BF16)
        plain = lower_for_cuda(value_and_gradients(self.layer()), *self.arguments())
        program = lower_for_cuda(
            value_and_gradients(self.layer(shared_expert=shared)), *self.arguments()
        )
        added = program.targets - plain.targets
        expected = {
            "grouped_matmul_activation": 1,
            "grouped_matmul": 2,
            "grouped_matmul_activation_gradient": 1,
        }
        self.assertEqual(added, expected)  # constants have no gradients
        own = [call for call in program.calls if call.operands[2:3] == ("1xi32",)]
        self.assertLen(own, sum(expected.values()))
        for call in own:
            self.assertStartsWith(call.operands[0], "16x")

    def test_local_only_sends_nothing(self):
        """Each device is a rank group of its own; no collective is left but the caller's sum."""
        specs = (P(), P(), P(), P("expert"), P("expert"))

        def f(ids, x, topk_weights, w_up, w_down):
            y, _ = jax_ep.moe_mlp(
                x, ids, topk_weights, w_up, w_down, axis_name="expert", local_only=True
            )
            return jax.lax.psum(y, "expert")

        layer = jax.shard_map(f, mesh=testing.expert_mesh(), in_specs=specs, out_specs=P())
        program = lower_for_cuda(layer, *self.arguments())
        for name in "dispatch", "combine":
            attributes = program.call(name).attributes
            self.assertEqual(attributes["group_size"], ("i64", 1))
            self.assertEqual(attributes["replica_groups"], ("i64[]", list(range(RANKS))))
        self.assertEqual(program.collectives(), ["all_reduce"])

    def test_one_chunk_rounds_in_the_kernel(self):
        program = lower_for_cuda(value_and_gradients(self.layer()), *self.arguments())
        for call in program.calls:
            if "rhs_gradient" in call.target:
                self.assertEqual(call.attributes["has_accumulator"], ("bool", False))
                self.assertEndsWith(call.results[0], "xbf16")


if __name__ == "__main__":
    absltest.main()
