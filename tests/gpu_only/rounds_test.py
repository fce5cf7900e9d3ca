"""Thousands of rounds of dispatch and combine in one program, with other routes in each, compared on the device."""

from __future__ import annotations

import functools
import os

import testing  # isort: skip

import cuda_programs
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax import lax
from testing import Sizes

import jax_ep

RANKS = testing.NUM_DEVICES
ROUNDS = int(os.environ.get("JAX_EP_TEST_ROUNDS", "10000"))
SIZES = {
    "usual": Sizes(RANKS, num_local=4, num_tokens=48, top_k=4, hidden=256),
    "dropping": Sizes(
        RANKS, num_local=2, num_tokens=32, top_k=3, hidden=64, row_align=8, recv_capacity=80
    ),
}


def random_ids(key, sizes: Sizes):
    """Ids [T, K] of a kind that changes from round to round: uniform, sparse, few experts, bad ones."""
    keys = jax.random.split(key, 4)
    shape = sizes.num_tokens, sizes.top_k
    few = jax.random.randint(keys[0], (), 1, sizes.num_experts + 1)
    ids = jax.random.randint(keys[1], shape, 0, few)
    density = jax.random.uniform(keys[2]) * 1.5  # all, two times in six
    ids = jnp.where(jax.random.uniform(keys[3], shape) < density, ids, -1)
    return ids.at[0, 0].set(jnp.where(few == 1, sizes.num_experts + 7, ids[0, 0]))


def differences(a, b):
    """How many elements differ in their bits."""
    if jnp.issubdtype(a.dtype, jnp.floating):
        a, b = (lax.bitcast_convert_type(v, f"uint{8 * v.dtype.itemsize}") for v in (a, b))
    return jnp.sum(a != b)


def layer(sizes: Sizes, x, ids, weights, implementation):
    """Everything that can be compared bit by bit, and whether something was routed at all."""
    by = {"implementation": implementation}
    sent = sizes.dispatch(x, ids, weights, **by)
    again = jax_ep.redispatch(-x, sent.plan, weights, **by)
    out = jax_ep.combine(sent.rows, sent.plan, sent.row_weights, **by)
    plan = jax.tree.leaves(sent.plan.arrays)
    return sent.rows, sent.row_weights, again.rows, again.row_weights, out, *plan


@functools.cache
def program(sizes: Sizes, dtype, kernels: str | None = None):
    """(seed[R], rounds[R]) -> differences of each result over all rounds, and the rows received."""

    def f(seed, rounds):
        rank = lax.axis_index("expert")

        def body(index, carry):
            total, received = carry
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed[0]), index), rank)
            ids = random_ids(key, sizes)
            x = jax.random.normal(key, (sizes.num_tokens, sizes.hidden)).astype(dtype)
            weights = jax.random.normal(key, ids.shape)
            got = layer(sizes, x, ids, weights, kernels)
            expected = layer(sizes, x, ids, weights, "xla")
            found = jnp.stack([differences(a, b) for a, b in zip(got, expected, strict=True)])
            return total + found, received + jax_ep._src.transfer.plan.PlanArrays(
                *got[5:]
            ).num_received[0]

        nothing = jnp.zeros(16, jnp.int32), jnp.int32(0)
        nothing = jax.tree.map(lambda a: lax.pcast(a, "expert", to="varying"), nothing)
        total, received = lax.fori_loop(0, rounds[0], body, nothing)
        return total[None], received[None]

    return testing.sharded(f, sizes.mesh)


def check(name: str, dtype, rounds: int):
    seed = np.full(RANKS, 1, np.int32)
    total, received = program(SIZES[name], dtype)(seed, np.full(RANKS, rounds, np.int32))
    np.testing.assert_array_equal(total, np.zeros_like(total))
    assert (np.asarray(received) > rounds).all(), received


class RoundsTest(parameterized.TestCase):
    @parameterized.parameters(("dropping", jnp.bfloat16, 1), ("usual", jnp.float32, 10))
    def test_every_round_is_right(self, name, dtype, fraction):
        check(name, dtype, max(1, ROUNDS // fraction))

    def test_comparison_notices_a_difference(self):
        a = jnp.array([1.0, 0.0], jnp.bfloat16)
        self.assertEqual(differences(a, jnp.array([1.0, -0.0], jnp.bfloat16)), 1)


class DelaysTest(absltest.TestCase):
    def test_with_random_delays(self):
        """Ranks and warps come late at random: nothing may rely on who is first."""
        cuda_programs.run(__file__, "DelayedTest", JAX_EP_TEST_DELAY_US="200")


class DelayedTest(absltest.TestCase):
    """In a process with delays; elsewhere a short run without."""

    def test_every_round_is_right(self):
        check("dropping", jnp.float16, max(1, ROUNDS // 20))


if __name__ == "__main__":
    absltest.main()
