"""Which implementation a call is lowered to, and the warning when that is not the kernels."""

from __future__ import annotations

import functools
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest.mock

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from programs import fallback_warnings, lower_for_cuda, struct
from testing import Sizes

import jax_ep

RANKS = testing.NUM_DEVICES
SIZES = Sizes(RANKS, num_local=4, num_tokens=16, top_k=2, hidden=64, row_align=8)


def arguments():
    """ids, x, topk_weights, matrices[E, H, H] of all ranks, as shapes."""
    tokens = RANKS * SIZES.num_tokens
    return (
        struct((tokens, 2), np.int32),
        struct((tokens, 64), jnp.bfloat16),
        struct((tokens, 2), np.float32),
        struct((SIZES.num_experts, 64, 64), jnp.bfloat16),
    )


def layer(ids, x, topk_weights, matrices, implementation=None):
    """Every operation, with one implementation."""
    sent = SIZES.dispatch(x, ids, topk_weights, implementation=implementation)
    y = jax_ep.grouped_matmul(sent.rows, matrices, sent.group_sizes, implementation=implementation)
    return jax_ep.combine(y, sent.plan, sent.row_weights, implementation=implementation)


def mapped(f, mesh=None):
    mesh = mesh or SIZES.mesh
    return jax.shard_map(f, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))


class ChoiceTest(parameterized.TestCase):
    def forward(self, **options):
        return mapped(functools.partial(layer, **options))

    def test_xla_has_no_custom_call(self):
        program = lower_for_cuda(self.forward(implementation="xla"), *arguments())
        self.assertEmpty(program.calls)
        self.assertNotIn(
            "jax_ep.", "".join(line for line in program.text.splitlines() if "custom_call" in line)
        )

    def test_environment_sets_the_default(self):
        with unittest.mock.patch.dict(os.environ, JAX_EP_IMPLEMENTATION="xla"):
            self.assertEmpty(lower_for_cuda(mapped(layer), *arguments()).calls)
            program = lower_for_cuda(self.forward(implementation="cuda"), *arguments())
            self.assertLen(program.calls, 3)  # an argument is stronger

    @parameterized.parameters("argument", "environment")
    def test_cuda_on_another_platform_is_an_error(self, by):
        if jax.default_backend() != "cpu":
            self.assertEqual(jax.default_backend(), "gpu")
            return
        environment = {"JAX_EP_IMPLEMENTATION": "cuda"} if by == "environment" else {}
        options = {"implementation": "cuda"} if by == "argument" else {}
        with unittest.mock.patch.dict(os.environ, environment):
            for error in NotImplementedError, jax_ep.Error:
                with self.assertRaisesRegex(error, "lowered for cpu"):
                    jax.jit(self.forward(**options)).lower(*arguments())

    def test_unsupported_shapes_warn_once_per_reason_and_use_xla(self):
        odd = [
            struct((a.shape[0], 63) if a.shape[-1] == 64 and a.ndim == 2 else a.shape, a.dtype)
            for a in arguments()
        ]
        odd[3] = struct((SIZES.num_experts, 63, 63), jnp.bfloat16)
        with fallback_warnings() as messages:
            for _ in range(2):
                program = lower_for_cuda(mapped(layer), *odd)
                self.assertNotIn("dispatch", program.targets)
                self.assertNotIn("combine", program.targets)
        self.assertLen(messages, 1)  # dispatch and combine have the same reason
        self.assertRegex(messages[0], "dispatch.*126 bytes.*16")
        with self.assertRaisesRegex(NotImplementedError, "126 bytes"):
            lower_for_cuda(self.forward(implementation="cuda"), *odd)

    def test_build_without_cuda_warns_once_and_uses_xla(self):
        with fallback_warnings() as messages:
            for _ in range(2):
                program = lower_for_cuda(mapped(layer), *arguments(), cuda_build=False)
                self.assertEmpty(program.calls)
        self.assertLen(messages, 1)
        self.assertRegex(messages[0], "no CUDA kernels")
        with self.assertRaisesRegex(NotImplementedError, "no CUDA kernels"):
            lower_for_cuda(self.forward(implementation="cuda"), *arguments(), cuda_build=False)

    def test_pure_jax_that_was_asked_for_does_not_warn(self):
        with fallback_warnings() as messages:
            lower_for_cuda(self.forward(implementation="xla"), *arguments(), cuda_build=False)
        self.assertEmpty(messages)

    def test_the_warning_is_visible_by_default(self):
        """In a fresh process, with Python's own filters, at the user's line: also for an export."""
        code = """
import jax, jax.export, jax.numpy as jnp
import jax_ep
jax_ep._src.core.runtime.has_cuda = lambda: False
shapes = [jax.ShapeDtypeStruct(s, d) for s, d in
          (((4, 8), jnp.bfloat16), ((2, 8, 8), jnp.bfloat16), ((2,), jnp.int32))]
f = jax.jit(jax_ep.grouped_matmul)
exported = jax.export.export(f, platforms=["cuda"])(*shapes)  # the line
assert "custom_call @jax_ep" not in exported.mlir_module()
"""
        with tempfile.TemporaryDirectory() as folder:
            script = pathlib.Path(folder) / "user.py"
            script.write_text(code)
            environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHONWARN")}
            environment.pop("JAX_EP_IMPLEMENTATION", None)
            result = subprocess.run(
                [sys.executable, str(script)],
                capture_output=True,
                text=True,
                timeout=120,
                env=environment,
            )
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertRegex(result.stderr, r"user\.py:8: UserWarning: jax_ep\.grouped_matmul runs as")
        self.assertEqual(result.stderr.count("UserWarning"), 1)

    def test_the_logger_says_how_calls_are_lowered(self):
        with self.assertLogs("jax_ep", "DEBUG") as logs, fallback_warnings():
            lower_for_cuda(mapped(layer), *arguments())
            lower_for_cuda(mapped(layer), *arguments(), cuda_build=False)
        self.assertTrue(all(record.levelname == "DEBUG" for record in logs.records))
        text = "\n".join(logs.output)
        self.assertIn("jax_ep.combine is lowered to its CUDA kernel", text)
        self.assertIn("jax_ep.combine runs as pure JAX on CUDA: this build", text)

    @parameterized.parameters(
        (dict(num_ranks=300), "axis has 300 ranks; .* 256"),
        (dict(top_k=65), "top_k is 65; .* 64"),
        (dict(hidden=4), "rows are 8 bytes; .* 16"),
        (dict(recv_capacity=2**30 + 1), "num_rows is 1073741825; .* 1073741824"),
        (dict(num_experts=2050), "there are 2050 experts; .* 2048"),
        (dict(num_tokens=2**24 + 1, top_k=32), "num_assignments is 1073741888; .* 1073741824"),
    )
    def test_what_the_transfer_kernels_do_not_take(self, change, reason):
        """On an abstract mesh: the choice looks at shapes alone. Every operation decides alike."""
        sizes = dict(num_ranks=2, num_tokens=16, top_k=2, hidden=64) | change
        num_ranks, num_tokens = sizes["num_ranks"], sizes["num_tokens"]
        mesh = AbstractMesh((num_ranks,), ("expert",), axis_types=(AxisType.Auto,))
        shapes = (
            struct((num_ranks * num_tokens, sizes["top_k"]), np.int32),
            struct((num_ranks * num_tokens, sizes["hidden"]), jnp.bfloat16),
        )

        def f(ids, x, implementations=(None, None, None)):
            first, again, back = implementations
            sent = jax_ep.dispatch(
                x,
                ids,
                None,
                num_experts=sizes.get("num_experts", 2 * num_ranks),
                axis_name="expert",
                recv_capacity=sizes.get("recv_capacity", 64),
                implementation=first,
            )
            rows = jax_ep.redispatch(2 * x, sent.plan, implementation=again).rows
            return jax_ep.combine(rows, sent.plan, None, implementation=back)

        with fallback_warnings() as messages:
            self.assertEmpty(lower_for_cuda(mapped(f, mesh), *shapes).calls)
        self.assertLen(messages, 1)  # dispatch, redispatch and combine have the same reason
        self.assertRegex(messages[0], reason)
        for index in range(3):
            chosen = ["cuda" if i == index else "xla" for i in range(3)]
            refused = functools.partial(f, implementations=chosen)
            with self.assertRaisesRegex(NotImplementedError, reason):
                lower_for_cuda(mapped(refused, mesh), *shapes)

    @parameterized.parameters(
        (dict(m=2**30 + 1), "num_rows is 1073741825"),
        (dict(n=2**30 + 1), "matrix_size is 1073741825"),
        (dict(k=2**30 + 1), "matrix_size is 1073741825"),
    )
    def test_what_the_matmul_kernels_do_not_take(self, change, reason):
        size = dict(m=8, k=8, n=8) | change
        shapes = struct((size["m"], size["k"])), struct((2, size["k"], size["n"]))
        call = functools.partial(jax_ep.grouped_matmul, implementation="cuda")
        for f in call, jax.grad(lambda lhs, rhs, sizes: call(lhs, rhs, sizes).sum(), (0, 1)):
            with self.assertRaisesRegex(NotImplementedError, reason):
                lower_for_cuda(f, *shapes, struct((2,), np.int32))


if __name__ == "__main__":
    absltest.main()
