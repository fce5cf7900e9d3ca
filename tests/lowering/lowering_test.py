"""Programs lowered for CUDA, without a GPU: custom calls, their attributes, and nothing else that costs."""

from __future__ import annotations

import contextlib
import functools
import sys
from unittest import mock

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from programs import lower_for_cuda, struct
from testing import Sizes

import jax_ep
from jax_ep._src.transfer.params import TransferParams

RANKS = testing.NUM_DEVICES
SIZES = Sizes(RANKS, num_local=4, num_tokens=16, top_k=2, hidden=64, row_align=8)
NUM_ROWS = RANKS * 16 * 2 + 4 * 8  # 4 * 7, rounded up to a multiple of 8
PLAN = (
    "4xi32",
    "4xi32",
    "5xi32",
    f"{NUM_ROWS}x3xi32",
    f"{NUM_ROWS}xi32",
    "16x2xi1",
    "16x2xi32",
    "1xi32",
    "1xi32",
    "1xi32",
    "1xi32",
)
BIG = 16 * 64  # elements of x on one rank: the smallest of the large arrays
GROUPS = ("i64[]", list(range(RANKS)))
TRANSFER = {
    "replica_groups": GROUPS,
    "group_size": ("i64", RANKS),
    "num_experts": ("i64", SIZES.num_experts),
    "row_align": ("i64", 8),
    "zero_tail": ("bool", True),
    "num_sms": ("i64", 0),
}


def arguments(dtype=jnp.bfloat16, weight_dtype=None):
    """ids, x, topk_weights, matrices[E, H, H] of all ranks, as shapes."""
    tokens = RANKS * SIZES.num_tokens
    return (
        struct((tokens, 2), np.int32),
        struct((tokens, 64), dtype),
        struct((tokens, 2), np.float32),
        struct((SIZES.num_experts, 64, 64), weight_dtype or dtype),
    )


def layer(ids, x, topk_weights, matrices, **options):
    """Linear in the rows, so that only jax_ep touches large arrays."""
    sent = SIZES.dispatch(x, ids, topk_weights, **options)
    y = jax_ep.grouped_matmul(sent.rows, matrices, sent.group_sizes)
    return jax_ep.combine(y, sent.plan, sent.row_weights)


def mapped(f=layer, mesh=None, **kwargs):
    mesh = mesh or SIZES.mesh
    return jax.shard_map(f, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"), **kwargs)


def gradient(f, argnums=(1, 2, 3)):
    return jax.grad(lambda *args: f(*args).astype(jnp.float32).sum(), argnums)


class CallsTest(parameterized.TestCase):
    @parameterized.parameters(("bf16", jnp.bfloat16), ("f16", jnp.float16), ("f32", jnp.float32))
    def test_forward(self, short, dtype):
        program = lower_for_cuda(mapped(), *arguments(dtype))
        self.assertEqual(program.targets, {"dispatch": 1, "grouped_matmul": 1, "combine": 1})
        rows, weights = f"{NUM_ROWS}x64x{short}", f"{NUM_ROWS}xf32"
        x = f"16x64x{short}"

        dispatch = program.call("dispatch")
        self.assertEqual(dispatch.attributes, TRANSFER | {"has_weights": ("bool", True)})
        self.assertEqual(dispatch.operands, (x, "16x2xi32", "16x2xf32"))
        self.assertEqual(dispatch.results, (rows, weights, *PLAN))

        combine = program.call("combine")
        flags = {"has_weights": ("bool", True), "has_scalars": ("bool", False)}
        self.assertEqual(combine.attributes, TRANSFER | flags)
        self.assertEqual(combine.operands, (rows, *PLAN, weights))
        self.assertEqual(combine.results, (x,))

        matmul = program.call("grouped_matmul")
        expected = {
            "transpose_rhs": ("bool", False),
            "zero_tail": ("bool", True),
            "num_sms": ("i64", 0),
        }
        self.assertEqual(matmul.attributes, expected)
        self.assertEqual(matmul.operands, (rows, f"4x64x64x{short}", "4xi32"))
        self.assertEqual(matmul.results, (rows,))

    def test_backward(self):
        program = lower_for_cuda(gradient(mapped()), *arguments())
        self.assertEqual(
            program.targets,
            {
                "dispatch": 1,
                "redispatch": 1,  # combine's gradient
                "combine": 1,  # dispatch's gradient; the forward combine is not needed
                "grouped_matmul": 2,
                "grouped_matmul_rhs_gradient": 1,
            },
        )
        rows, weights = f"{NUM_ROWS}x64xbf16", f"{NUM_ROWS}xf32"
        redispatch = program.call("redispatch")
        self.assertEqual(redispatch.attributes, TRANSFER | {"has_weights": ("bool", False)})
        self.assertEqual(redispatch.operands, ("16x64xbf16", *PLAN))
        self.assertEqual(redispatch.results, (rows,))
        combine = program.call("combine")
        self.assertEqual(combine.attributes["has_scalars"], ("bool", True))
        self.assertEqual(combine.attributes["has_weights"], ("bool", False))
        self.assertEqual(combine.operands, (rows, *PLAN, weights))
        self.assertEqual(combine.results, ("16x64xbf16", "16x2xf32"))
        rhs_gradient = program.call("grouped_matmul_rhs_gradient")
        expected = {
            "transpose_rhs": ("bool", False),
            "has_accumulator": ("bool", False),
            "num_sms": ("i64", 0),
        }
        self.assertEqual(rhs_gradient.attributes, expected)
        self.assertEmpty(rhs_gradient.aliases)
        self.assertEqual(
            (rhs_gradient.operands, rhs_gradient.results),
            ((rows, rows, "4xi32"), ("4x64x64xbf16",)),
        )

    @parameterized.parameters(False, True)
    def test_an_accumulator_is_the_result(self, transpose_rhs):
        """The custom call aliases it, so XLA gives both the same memory; nothing else touches it."""
        f = lambda lhs, out_gradient, sizes, accumulator: jax_ep.grouped_matmul_rhs_gradient(
            lhs,
            out_gradient,
            sizes,
            accumulator=accumulator,
            transpose_rhs=transpose_rhs,
            num_sms=6,
        )
        shape = (4, 48, 32) if transpose_rhs else (4, 32, 48)
        program = lower_for_cuda(
            f,
            struct((64, 32), jnp.bfloat16),
            struct((64, 48), jnp.bfloat16),
            struct((4,), np.int32),
            struct(shape),
        )
        call = program.call("grouped_matmul_rhs_gradient")
        expected = {
            "transpose_rhs": ("bool", transpose_rhs),
            "has_accumulator": ("bool", True),
            "num_sms": ("i64", 6),
        }
        self.assertEqual(call.attributes, expected)
        matrices = "x".join(map(str, shape)) + "xf32"
        self.assertEqual(call.operands, ("64x32xbf16", "64x48xbf16", "4xi32", matrices))
        self.assertEqual(call.results, (matrices,))
        self.assertEqual(call.aliases, {3: 0})
        self.assertEmpty(program.operations_on(4))

    def test_options_become_attributes(self):
        program = lower_for_cuda(
            mapped(functools.partial(layer, zero_tail=False, num_sms=7, row_align=128)),
            *arguments(),
        )
        attributes = program.call("dispatch").attributes
        self.assertEqual(attributes["num_sms"], ("i64", 7))
        self.assertEqual(attributes["zero_tail"], ("bool", False))
        self.assertEqual(attributes["row_align"], ("i64", 128))
        # combine has the plan's; its num_sms is its own
        attributes = program.call("combine").attributes
        self.assertEqual(attributes["zero_tail"], ("bool", False))
        self.assertEqual(attributes["num_sms"], ("i64", 0))

    def test_calls_of_a_lane_have_its_attributes(self):
        params = functools.partial(TransferParams, lane=1, num_lanes=2)
        modules = ("dispatch", "plan")
        with contextlib.ExitStack() as patches:
            for module in modules:
                patches.enter_context(
                    mock.patch.object(
                        sys.modules[f"jax_ep._src.transfer.{module}"], "TransferParams", params
                    )
                )
            program = lower_for_cuda(gradient(mapped()), *arguments())
        lane = {"lane": ("i64", 1), "num_lanes": ("i64", 2)}
        for operation in ("dispatch", "redispatch", "combine"):
            attributes = program.call(operation).attributes
            self.assertEqual(attributes, attributes | TRANSFER | lane)

    def test_redispatch_exchanges_no_metadata(self):
        def f(ids, x, topk_weights, _):
            plan = SIZES.dispatch(x, ids, None).plan
            return jax_ep.redispatch(2 * x, plan, topk_weights, num_sms=5).rows

        program = lower_for_cuda(mapped(f), *arguments())
        self.assertEqual(program.targets, {"dispatch": 1, "redispatch": 1})
        call = program.call("redispatch")
        self.assertEqual(call.operands, ("16x64xbf16", *PLAN, "16x2xf32"))
        self.assertEqual(call.attributes["has_weights"], ("bool", True))
        self.assertEqual(call.attributes["num_sms"], ("i64", 5))
        self.assertEqual(program.call("dispatch").attributes["has_weights"], ("bool", False))

    def test_no_value_of_a_process_is_in_the_program(self):
        """Permuted devices give the same text, and so does a mesh without any."""
        devices = jax.devices()[:RANKS]
        meshes = [
            testing.mesh_of((RANKS,), ("expert",), devices=d) for d in (devices, devices[::-1])
        ]
        meshes.append(AbstractMesh((RANKS,), ("expert",), axis_types=(AxisType.Auto,)))
        texts = {str(lower_for_cuda(mapped(mesh=mesh), *arguments()).calls) for mesh in meshes}
        self.assertLen(texts, 1)


class RematTest(parameterized.TestCase):
    POLICIES = {
        None: {"dispatch": 2, "combine": 1},
        ("jax_ep.plan",): {"dispatch": 2, "combine": 1},
        jax_ep.REMAT_NAMES: {"dispatch": 1, "combine": 1},
    }

    @parameterized.parameters(*[(names,) for names in POLICIES])
    def test_what_the_backward_pass_repeats(self, names):
        """With the exported names, dispatch is once in the program: nothing is exchanged again."""
        policy = names and jax.checkpoint_policies.save_only_these_names(*names)

        def f(ids, x, topk_weights, matrices):
            return jnp.sin(jax.checkpoint(layer, policy=policy)(ids, x, topk_weights, matrices))

        forward_and_backward = lambda *args: jax.value_and_grad(
            lambda *args: mapped(f)(*args).astype(jnp.float32).sum(), (1, 2, 3)
        )(*args)
        targets = lower_for_cuda(forward_and_backward, *arguments()).targets
        self.assertEqual(targets["redispatch"], 1)
        self.assertEqual(targets["dispatch"], self.POLICIES[names]["dispatch"])
        self.assertEqual(targets["combine"], 2)  # combine, and dispatch's gradient


class NothingElseTest(parameterized.TestCase):
    def test_forward_has_only_the_calls(self):
        program = lower_for_cuda(mapped(), *arguments())
        self.assertEmpty(program.operations_on(BIG))
        self.assertEmpty(program.collectives())

    def test_backward_has_only_calls_and_elementwise_operations(self):
        program = lower_for_cuda(gradient(mapped()), *arguments())
        elementwise = {
            "multiply",
            "convert",
            "broadcast_in_dim",
            "select",
            "reduce",
            "constant",
            "add",
        }
        self.assertContainsSubset(program.operations_on(BIG), elementwise)
        self.assertEmpty(program.collectives())

    @parameterized.product(transpose_rhs=[False, True], weight_dtype=[jnp.bfloat16, jnp.float32])
    def test_matrices_are_not_copied(self, transpose_rhs, weight_dtype):
        """Neither transposed nor cast, forward and backward: [G,K,N], [G,N,K] and master weights are read as is."""

        def f(lhs, rhs, sizes, out_gradient):
            def call(lhs, rhs):
                return jax_ep.grouped_matmul(lhs, rhs, sizes, transpose_rhs=transpose_rhs)

            out, backward = jax.vjp(call, lhs, rhs)
            return out, backward(out_gradient)

        program = lower_for_cuda(
            f,
            struct((64, 32), jnp.bfloat16),
            struct((4, 48, 32) if transpose_rhs else (4, 32, 48), weight_dtype),
            struct((4,), np.int32),
            struct((64, 48), jnp.bfloat16),
        )
        self.assertEmpty(program.operations_on(64 * 32))
        flags = [call.attributes["transpose_rhs"][1] for call in program.calls]
        self.assertEqual(program.targets, {"grouped_matmul": 2, "grouped_matmul_rhs_gradient": 1})
        self.assertEqual(sorted(flags), sorted([transpose_rhs, not transpose_rhs, transpose_rhs]))
        rhs_gradient = program.call("grouped_matmul_rhs_gradient")
        self.assertEndsWith(
            rhs_gradient.results[0], "f32" if weight_dtype == jnp.float32 else "bf16"
        )

    def test_vmap_calls_one_after_another(self):
        """One call site in a loop: the same order on every rank."""
        stages = [struct((a.shape[0], 2, *a.shape[1:]), a.dtype) for a in arguments()]
        f = jax.vmap(layer, in_axes=1, out_axes=1)
        program = lower_for_cuda(mapped(f), *stages)
        self.assertEqual(program.targets, {"dispatch": 1, "grouped_matmul": 1, "combine": 1})
        self.assertEmpty(program.collectives())


if __name__ == "__main__":
    absltest.main()
