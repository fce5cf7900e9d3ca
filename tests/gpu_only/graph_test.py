"""CUDA graphs: captured programs are replayed with other routes, other workspaces, and after a release."""

from __future__ import annotations

import functools

import testing  # isort: skip

import cuda_programs
import jax
import numpy as np
import numpy_moe
from absl.testing import absltest, parameterized
from testing import Sizes

import jax_ep

RANKS = testing.NUM_DEVICES
SMALL = Sizes(RANKS, num_local=2, num_tokens=16, top_k=3, hidden=64, row_align=4)
LARGE = Sizes(RANKS, num_local=4, num_tokens=256, top_k=4, hidden=1024)

COMMANDS = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,DYNAMIC_SLICE_FUSION"
MODES = {
    "graphs": f"--xla_gpu_enable_command_buffer={COMMANDS} --xla_gpu_graph_min_graph_size=1",
    "no_graphs": "--xla_gpu_enable_command_buffer=",
}


@functools.cache
def program(sizes: Sizes):
    """(x, ids, weights) -> plan, rows, and their combine; then the same tokens once more along the plan."""

    def f(x, ids, weights):
        sent = sizes.dispatch(x, ids, weights)
        again = jax_ep.redispatch(2 * x, sent.plan).rows
        out = jax_ep.combine(sent.rows, sent.plan, sent.row_weights)
        return sent.plan, sent.rows, out, again

    return testing.sharded(f, sizes.mesh)


def check(sizes: Sizes, seed: int):
    rng = np.random.default_rng(seed)
    routings = testing.routings(sizes, seed)
    ids = routings[sorted(routings)[seed % len(routings)]]
    x = testing.random_values(rng, (*ids.shape[:2], sizes.hidden))
    weights = testing.random_values(rng, ids.shape)
    plan, *got = program(sizes)(*testing.merge_ranks((x, ids, weights)))
    got = testing.split_ranks(got, RANKS)
    plans = sizes.plans(ids)
    message = f"seed {seed}"
    testing.assert_plan(plan, plans, message)
    rows, row_weights = numpy_moe.dispatch(x, weights, plans)
    testing.assert_bitwise(got[0], rows, message)
    if sizes == SMALL:  # loops over the elements of a larger one would take long
        testing.assert_bitwise(got[1], numpy_moe.combine(rows, plans, row_weights), message)
    testing.assert_bitwise(got[2], 2 * rows, message)


class ReplayTest(parameterized.TestCase):
    """Each in this process as it is; `ModesTest` runs them in others."""

    def test_changing_routes(self):
        for seed in range(24):
            check(SMALL, seed)
        self.assertEqual(program(SMALL)._cache_size(), 1)

    def test_a_larger_program_makes_the_workspace_grow(self):
        for seed in range(4):
            check(SMALL, seed)
        for seed in range(3):
            check(LARGE, seed)
        for seed in range(4):
            check(SMALL, seed)
            check(LARGE, seed)

    def test_release(self):
        for seed in range(3):
            check(SMALL, seed)
            check(LARGE, seed)
        for cycle in range(3):
            self.assertGreater(jax_ep.release(), 0)
            self.assertEqual(jax_ep.release(), 0)
            for seed in range(3):
                check(LARGE if cycle == 1 else SMALL, seed)
                check(SMALL if cycle == 1 else LARGE, seed)

    def test_independent_calls_in_one_program(self):
        """XLA may order them as it likes, or put them side by side into one graph."""

        def f(x, ids, other_ids):
            outs = []
            for factor, of_call in ((1, ids), (2, other_ids), (3, ids[::-1])):
                dispatched = SMALL.dispatch(factor * x, of_call, None)
                outs.append(jax_ep.combine(dispatched.rows, dispatched.plan, None))
            return outs

        f = testing.sharded(f, SMALL.mesh)
        x = np.ones((RANKS * SMALL.num_tokens, SMALL.hidden), np.float32)
        for seed in range(8):
            kinds = testing.routings(SMALL, seed)
            ids, other = kinds["half"], kinds["uniform"]
            got = f(x, *testing.merge_ranks((ids, other)))
            for factor, of_call, out in zip(
                (1, 2, 3), (ids, other, ids[:, ::-1]), got, strict=True
            ):
                expected = factor * (testing.merge_ranks(of_call) >= 0).sum(1, keepdims=True)
                np.testing.assert_array_equal(out, np.repeat(expected, SMALL.hidden, 1))


class ModesTest(parameterized.TestCase):
    @parameterized.parameters(*MODES)
    def test_replays(self, mode):
        result = cuda_programs.run(
            __file__, "ReplayTest", flags=MODES[mode],
            TF_CPP_MIN_LOG_LEVEL="0", TF_CPP_VMODULE="command_buffer_thunk=3",
        )  # fmt: skip
        if jax.default_backend() == "gpu":
            self.assertEqual("command_buffer_thunk" in result.stderr, mode == "graphs")


if __name__ == "__main__":
    absltest.main()
