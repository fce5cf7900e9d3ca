"""Plan as a pytree: frozen, hashed by value, through every transformation and out of shard_map and back."""

from __future__ import annotations

import dataclasses
import functools

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
import numpy_moe
from absl.testing import absltest, parameterized
from jax import lax
from jax.sharding import PartitionSpec as P
from testing import Sizes

import jax_ep

SIZES = Sizes(testing.NUM_DEVICES, num_local=2, num_tokens=4, top_k=2, row_align=2)
STATICS = ("axis_name", "num_ranks", "num_experts", "row_align", "zero_tail", "nvlink_domain_size")


@functools.cache
def planner(**kwargs):
    """ids -> plan, out of shard_map by P("expert")."""
    nothing = lambda: jnp.zeros((SIZES.num_tokens, 8))
    return testing.sharded(
        lambda ids: SIZES.dispatch(nothing(), ids, None, **kwargs).plan, SIZES.mesh
    )


def some_ids(seed=0, kind="half"):
    return testing.merge_ranks(testing.routings(SIZES, seed)[kind])


def combine_ones(plan):
    """How many rows each token has: a use of every array that combine reads."""
    return jax_ep.combine(jnp.ones((plan.row_source.shape[0], 8)), plan, None)


def expected_counts(ids):
    return np.repeat((ids >= 0).sum(1, keepdims=True), 8, axis=1).astype(np.float32)


class PytreeTest(parameterized.TestCase):
    def test_fields_in_order(self):
        names = tuple(field.name for field in dataclasses.fields(jax_ep.Plan))
        self.assertEqual(names, numpy_moe.FIELDS + STATICS + ("forwarding",))
        plan = planner()(some_ids())
        leaves = jax.tree.leaves(plan)
        self.assertLen(leaves, len(numpy_moe.FIELDS))
        for name, leaf in zip(numpy_moe.FIELDS, leaves, strict=True):
            self.assertIs(getattr(plan, name), leaf)
            self.assertGreaterEqual(leaf.ndim, 1)

    def test_is_frozen(self):
        plan = planner()(some_ids())
        with self.assertRaises(dataclasses.FrozenInstanceError):
            plan.status = 1
        with self.assertRaises(dataclasses.FrozenInstanceError):
            plan.num_ranks = 1

    def test_statics_compare_and_hash_by_value(self):
        structures = [jax.tree.structure(planner()(some_ids(seed))) for seed in range(2)]
        self.assertEqual(*structures)
        self.assertEqual(*map(hash, structures))
        other = jax.tree.structure(planner(zero_tail=False)(some_ids()))
        self.assertNotEqual(structures[0], other)

    def test_statics_say_how_it_was_made(self):
        plan = planner(zero_tail=False)(some_ids())
        statics = tuple(getattr(plan, name) for name in STATICS)
        self.assertEqual(statics, ("expert", SIZES.num_ranks, SIZES.num_experts, 2, False, None))

    def test_arrays_of_different_calls_do_not_retrace(self):
        traces = []

        @jax.jit
        def use(plan):
            traces.append(None)
            return plan.kept.sum()

        for seed in range(3):
            use(planner()(some_ids(seed)))
        self.assertLen(traces, 1)
        use(planner(zero_tail=False)(some_ids()))
        self.assertLen(traces, 2)


class OutAndInTest(parameterized.TestCase):
    @parameterized.parameters(True, False)
    def test_a_second_shard_map_uses_it(self, check_vma):
        ids = some_ids()
        plan = planner()(ids)
        use = testing.sharded(combine_ones, SIZES.mesh, check_vma=check_vma)
        testing.assert_bitwise(use(plan), expected_counts(ids))

    def test_dispatch_along_it_in_a_second_shard_map(self):
        ids = some_ids()
        x = np.random.default_rng(0).standard_normal((len(ids), 8)).astype(np.float32)
        again = testing.sharded(lambda x, plan: jax_ep.redispatch(x, plan).rows, SIZES.mesh)
        plans = SIZES.plans(ids.reshape(SIZES.ids_shape))
        expected, _ = numpy_moe.dispatch(x.reshape(SIZES.num_ranks, -1, 8), None, plans)
        testing.assert_bitwise(again(x, planner()(ids)), testing.merge_ranks(expected))

    def test_through_the_host(self):
        """Saved and loaded: numpy arrays serve as well."""
        ids = some_ids()
        plan = jax.tree.map(np.asarray, planner()(ids))
        testing.assert_bitwise(
            testing.sharded(combine_ones, SIZES.mesh)(plan), expected_counts(ids)
        )


class TransformsTest(parameterized.TestCase):
    def run_inside(self, f, ids, **kwargs):
        return testing.sharded(f, SIZES.mesh, **kwargs)(ids)

    def plan(self, ids):
        return SIZES.dispatch(jnp.zeros((SIZES.num_tokens, 8)), ids, None).plan

    @parameterized.parameters(True, False)
    def test_scan_carry_and_output(self, check_vma):
        ids = some_ids()

        def f(ids):
            def step(plan, _):
                new = self.plan(jnp.roll(ids, 1, 1))
                return new, (plan, combine_ones(plan))

            plan, (plans, sums) = lax.scan(step, self.plan(ids), length=3)
            first = jax.tree.map(lambda a: a[0], plans)
            return sums.sum(0) + combine_ones(plan) + combine_ones(first)

        got = self.run_inside(f, ids, check_vma=check_vma)
        testing.assert_bitwise(got, 5 * expected_counts(ids))

    def test_jit_inside(self):
        ids = some_ids()
        f = lambda ids: jax.jit(combine_ones)(jax.jit(self.plan)(ids))
        testing.assert_bitwise(self.run_inside(f, ids), expected_counts(ids))

    def test_cond(self):
        ids = some_ids()

        def f(ids):
            plan = self.plan(ids)
            flag = lax.psum(ids.size, "expert") > 0
            plan = lax.cond(flag, lambda: plan, lambda: self.plan(jnp.roll(ids, 1, 0)))
            return combine_ones(plan)

        testing.assert_bitwise(self.run_inside(f, ids), expected_counts(ids))

    def test_remat(self):
        ids = some_ids()

        def f(x, ids):
            @jax.checkpoint
            def inner(x, plan):
                rows = jax_ep.redispatch(x, plan).rows
                return jax_ep.combine(jnp.sin(rows), plan, None)

            plan = jax.checkpoint(self.plan)(ids)
            return inner(x, plan)

        f = testing.sharded(f, SIZES.mesh)
        x = np.ones((len(ids), 8), np.float32)
        gradient = jax.grad(lambda x: f(x, ids).sum())(x)
        testing.assert_close(gradient, np.cos(1) * expected_counts(ids))

    def test_vmap(self):
        ids = np.stack([some_ids(0), some_ids(1)], axis=1)

        def f(ids):
            plans = jax.vmap(self.plan, in_axes=1)(ids)
            self.assertEqual(plans.kept.shape, (2, SIZES.num_tokens, SIZES.top_k))
            return jax.vmap(combine_ones, out_axes=1)(plans)

        expected = np.stack([expected_counts(some_ids(0)), expected_counts(some_ids(1))], 1)
        testing.assert_bitwise(self.run_inside(f, ids), expected)


class DispatchedTest(parameterized.TestCase):
    def test_is_a_frozen_pytree_and_no_tuple(self):
        """Members may be added: nobody may rely on how many there are."""
        names = [field.name for field in dataclasses.fields(jax_ep.Dispatched)]
        self.assertEqual(names, ["rows", "row_weights", "group_sizes", "plan"])
        dispatched = jax_ep.Dispatched(1, None, 2, 3)
        self.assertEqual(jax.tree.leaves(dispatched), [1, 2, 3])
        self.assertEqual(jax.tree.map(lambda a: 2 * a, dispatched).rows, 2)
        with self.assertRaises(dataclasses.FrozenInstanceError):
            dispatched.rows = 0
        with self.assertRaises(TypeError):
            tuple(dispatched)

    def test_group_sizes_are_the_plans(self):
        def f(ids):
            dispatched = SIZES.dispatch(jnp.zeros((SIZES.num_tokens, 8)), ids, None)
            self.assertIs(dispatched.group_sizes, dispatched.plan.group_sizes)
            return dispatched.plan

        jax.eval_shape(
            jax.shard_map(f, mesh=SIZES.mesh, in_specs=P("expert"), out_specs=P("expert")),
            some_ids(),
        )


if __name__ == "__main__":
    absltest.main()
