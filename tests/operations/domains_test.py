"""Experts over several NVLink domains against the numpy oracle, bit by bit: values, plans and gradients."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import unittest.mock
import warnings

import testing  # isort: skip

import flax.serialization
import hypothesis
import hypothesis.extra.numpy
import jax
import jax.numpy as jnp
import moe_layers
import numpy as np
import numpy_moe
import tier
from absl.testing import absltest, parameterized
from flax import nnx
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from testing import Sizes

import jax_ep
import jax_ep.nnx
from jax_ep import quant
from jax_ep._src.core import primitive
from jax_ep._src.layer import domains
from jax_ep._src.layer.domains import with_domains
from jax_ep._src.transfer.domains import Forwarding

MOST = testing.NUM_DEVICES
RANKS = testing.rank_counts(4, 8)
HALF = max(1, RANKS[-1] // 2)


def sizes_of(num_ranks: int, domain_size: int | None, **others) -> Sizes:
    others = {"num_local": 2, "num_tokens": 5, "top_k": 4} | others
    return Sizes(num_ranks, domain_size=domain_size, **others)


CASES = [
    {"num_ranks": num_ranks, "domain_size": size}
    for num_ranks in RANKS
    for size in (1, 2, 4)
    if num_ranks % size == 0
]


@functools.cache
def compiled(sizes: Sizes, with_weights: bool = True):
    """(ids, x, weights, y, other, rows_bar, out_bar) -> results, plan, and the gradients of x, weights, y, row weights."""

    def run(ids, x, weights, y, other, rows_bar, out_bar):
        weights = weights if with_weights else None

        def there(x, weights):
            sent = sizes.dispatch(x, ids, weights)
            return (sent.rows, sent.row_weights), sent.plan

        (rows, row_weights), pull_back, plan = jax.vjp(there, x, weights, has_aux=True)
        weights_bar = None if row_weights is None else rows_bar[:, 0].astype(jnp.float32)
        back = lambda y, row_weights: jax_ep.combine(y, plan, row_weights)
        out, pull_home = jax.vjp(back, y, row_weights)
        again = jax_ep.redispatch(other, plan, weights)
        return (
            (rows, row_weights, out, again.rows, again.row_weights),
            plan,
            (*pull_back((rows_bar, weights_bar)), *pull_home(out_bar)),
        )

    return testing.sharded(run, sizes.mesh)


def random_arguments(sizes: Sizes, ids, dtype, seed=0):
    """Tokens and cotangents; rows that are of no token are NaN in y alone."""
    rng = np.random.default_rng(seed)
    plans = sizes.plans(ids)
    capacity = len(plans[0].row_source)
    draw = lambda *shape: testing.random_values(rng, (sizes.num_ranks, *shape), dtype)
    x, other, out_bar = (draw(sizes.num_tokens, sizes.hidden) for _ in range(3))
    y, rows_bar = (draw(capacity, sizes.hidden) for _ in range(2))
    numpy_moe.poison_tail(y, plans)
    weights = testing.random_values(rng, ids.shape)
    return plans, (ids, x, weights, y, other, rows_bar, out_bar)


def check_all(sizes: Sizes, ids, dtype, message, with_weights=True):
    plans, arguments = random_arguments(sizes, ids, dtype)
    merged = testing.merge_ranks(arguments)
    results, plan, gradients = compiled(sizes, with_weights)(*merged)
    testing.assert_plan(plan, plans, message)
    results, gradients = testing.split_ranks((results, gradients), sizes.num_ranks)
    _, x, weights, y, other, rows_bar, out_bar = arguments
    weights = weights if with_weights else None
    rows, row_weights = numpy_moe.dispatch(x, weights, plans)
    expected = [rows, row_weights, numpy_moe.combine(y, plans, row_weights)]
    expected += numpy_moe.dispatch(other, weights, plans)
    names = ("rows", "row weights", "out", "rows again", "row weights again")
    for name, a, b in zip(names, results, expected, strict=True):
        testing.assert_bitwise(a, b, f"{message} {name}") if b is not None else None
    scalars = None if weights is None else rows_bar[..., 0].astype(np.float32)
    expected = numpy_moe.dispatch_gradient(rows_bar, scalars, plans)
    expected += numpy_moe.combine_gradient(out_bar, y, plans, row_weights)
    names = ("x", "weights", "y", "row weights")
    for name, a, b in zip(names, gradients, expected, strict=True):
        if name == "row weights" and b is not None:  # a dot of a row, in no fixed order
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3, err_msg=f"{message} {name}")
        elif b is not None:
            testing.assert_bitwise(a, b, f"{message} gradient of {name}")


class BitwiseTest(parameterized.TestCase):
    @parameterized.product(case=CASES, dtype=[jnp.bfloat16, jnp.float32])
    def test_every_kind_of_routing(self, case, dtype):
        sizes = sizes_of(**case)
        for kind, ids in testing.routings(sizes, seed=1).items():
            check_all(sizes, ids, dtype, kind)

    @parameterized.parameters(*CASES)
    @tier.needs_gpus(2)
    def test_drops_and_alignment(self, **case):
        sizes = sizes_of(**case, row_align=2, recv_capacity=14)
        for kind in "skewed", "uniform", "to_one_rank":
            ids = testing.routings(sizes, seed=2)[kind]
            check_all(sizes, ids, jnp.bfloat16, kind)
            self.assertGreater(sum(int(p.num_dropped[0]) for p in sizes.plans(ids)), 0)

    def test_without_weights(self):
        sizes = sizes_of(RANKS[-1], HALF)
        check_all(sizes, testing.routings(sizes)["repeats"], jnp.float32, "", with_weights=False)

    @parameterized.parameters((count,) for count in testing.rank_counts(3, 5))
    def test_odd_numbers_of_domains(self, num_domains):
        """Of two ranks each, if there are as many devices."""
        num_ranks = num_domains if 2 * num_domains > MOST else 2 * num_domains
        sizes = sizes_of(num_ranks, num_ranks // num_domains, hidden=3)
        for kind, ids in testing.routings(sizes, seed=3).items():
            check_all(sizes, ids, jnp.bfloat16, kind)


class PropertyTest(absltest.TestCase):
    @hypothesis.settings(max_examples=40, deadline=None, derandomize=True, database=None)
    @hypothesis.given(data=st.data(), case=st.sampled_from(CASES))
    def test_any_routes(self, data, case):
        sizes = sizes_of(**case, num_tokens=3, top_k=3, hidden=4, recv_capacity=12)
        elements = st.integers(-2, sizes.num_experts)
        ids = data.draw(hypothesis.extra.numpy.arrays(np.int32, sizes.ids_shape, elements=elements))
        check_all(sizes, ids, jnp.bfloat16, "")


class MeshesTest(parameterized.TestCase):
    @parameterized.parameters(("a", "b"), (("a", "b"), ()), (("b", "a"), ()))
    def test_of_two_axes(self, expert, data):
        """Groups of ranks along one axis, and ranks along both: each group is as one alone."""
        shape = testing.two_axes()
        mesh = testing.mesh_of(shape, ("a", "b"))
        num_ranks = int(np.prod([mesh.shape[n] for n in np.atleast_1d(expert)]))
        size = max(1, num_ranks // 2)
        sizes = sizes_of(num_ranks, size)
        rng = np.random.default_rng(0)
        num_groups = MOST // num_ranks
        ids = np.stack([testing.routings(sizes, seed)["uniform"] for seed in range(num_groups)])
        x = testing.random_values(rng, (*ids.shape[:3], sizes.hidden), jnp.bfloat16)

        def layer(x, ids):
            sent = sizes.dispatch(x, ids, None, axis_name=expert)
            return jax_ep.combine(sent.rows, sent.plan, None)

        axes = (*np.atleast_1d(data), *np.atleast_1d(expert)) if data else expert
        run = testing.sharded(layer, mesh, axes)
        got = run(*(a.reshape(-1, *a.shape[3:]) for a in (x, ids))).reshape(x.shape)
        for group in range(num_groups):
            plans = sizes.plans(ids[group])
            rows, _ = numpy_moe.dispatch(x[group], None, plans)
            testing.assert_bitwise(got[group], numpy_moe.combine(rows, plans, None))


class OneLevelTest(parameterized.TestCase):
    def outputs(self, domain_size, dtype=jnp.bfloat16):
        sizes = sizes_of(RANKS[-1], domain_size, num_tokens=16, hidden=32)
        ids = testing.routings(sizes)["uniform"]
        _, arguments = random_arguments(sizes, ids, dtype)
        results, plan, gradients = compiled(sizes)(*testing.merge_ranks(arguments))
        return (results, gradients), plan

    @parameterized.parameters(1, RANKS[-1])
    def test_domains_of_one_rank_and_of_all_change_no_bit(self, domain_size):
        expected, _ = self.outputs(None)
        got, _ = self.outputs(domain_size)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            testing.assert_bitwise(a, b)

    @tier.needs_gpus(4)
    def test_other_domains_round_otherwise(self):
        differs = np.asarray(self.outputs(None)[0][0][2]) != np.asarray(self.outputs(2)[0][0][2])
        self.assertTrue(differs.any())

    @tier.needs_gpus(4)
    def test_one_domain_is_one_level(self):
        _, plan = self.outputs(RANKS[-1])
        self.assertIsNone(plan.nvlink_domain_size)
        self.assertIsNone(plan.forwarding)
        _, plan = self.outputs(2)
        self.assertEqual(plan.nvlink_domain_size, 2)


@tier.needs_gpus(2)
class PlanTest(parameterized.TestCase):
    sizes = sizes_of(RANKS[-1], HALF)

    def plan(self):
        ids = testing.merge_ranks(testing.routings(self.sizes)["uniform"])
        nothing = self.sizes.nothing
        return testing.sharded(
            lambda ids: self.sizes.dispatch(nothing(), ids, None).plan, self.sizes.mesh
        )(ids)

    def test_a_failed_exchange_poisons_all(self):
        plan = dataclasses.replace(self.plan(), status=np.ones(self.sizes.num_ranks, np.int32))
        num_rows = plan.row_source.shape[0]
        out = testing.sharded(lambda y, plan: jax_ep.combine(y, plan, None), self.sizes.mesh)(
            jnp.ones((num_rows, 8)), plan
        )
        self.assertTrue(np.isnan(out).all())

    def test_exported_programs_and_state_dicts_have_it(self):
        plan = self.plan()
        copy = jax.jit(lambda plan: jax.tree.map(lambda a: a + (a.dtype != bool), plan))
        exported = jax.export.deserialize(jax.export.export(copy)(plan).serialize())
        state = flax.serialization.to_state_dict(plan)
        for got in exported.call(plan), flax.serialization.from_state_dict(plan, state):
            self.assertEqual(got.nvlink_domain_size, plan.nvlink_domain_size)
            self.assertIsInstance(got.forwarding, Forwarding)
            self.assertEqual(jax.tree.structure(got), jax.tree.structure(plan))

    def test_vmap(self):
        """One call after another: each element has its own plan."""
        sizes = self.sizes
        ids = np.stack([testing.routings(sizes)[kind] for kind in ("uniform", "skewed")])
        x = testing.random_values(np.random.default_rng(0), (*ids.shape[:3], sizes.hidden))

        def layer(x, ids):
            sent = sizes.dispatch(x, ids, None)
            return jax_ep.combine(sent.rows, sent.plan, None)

        merged = [testing.merge_ranks(a) for a in (*x, *ids)]
        x, ids = (np.stack(merged[i : i + 2], 1) for i in (0, 2))  # [R * T, 2, ...]
        each = jax.vmap(layer, (1, 1), 1)
        got = testing.sharded(each, sizes.mesh)(x, ids)
        one = testing.sharded(layer, sizes.mesh)
        for i in range(2):
            testing.assert_bitwise(got[:, i], one(x[:, i], ids[:, i]))

    def test_under_checkpoint_and_scan(self):
        """The private arrays are saved and restored as the others."""
        sizes = self.sizes
        ids = testing.routings(sizes)["uniform"]
        x = testing.random_values(np.random.default_rng(0), (*ids.shape[:2], sizes.hidden))

        def layer(x, ids):
            sent = sizes.dispatch(x, ids, None)
            return jax_ep.combine(jnp.tanh(sent.rows), sent.plan, None)

        policy = jax.checkpoint_policies.save_only_these_names(*jax_ep.REMAT_NAMES)

        def gradient(f):
            def total(x, ids):
                out, _ = jax.lax.scan(lambda x, _: (f(x, ids), None), x, None, 2)
                return jnp.sum(jnp.sin(out))

            return testing.sharded(jax.grad(total), sizes.mesh)(*testing.merge_ranks((x, ids)))

        got, expected = gradient(jax.checkpoint(layer, policy=policy)), gradient(layer)
        testing.assert_bitwise(got, expected)


class LayerTest(parameterized.TestCase):
    """moe_mlp and modules over domains are made of the operations over domains."""

    sizes = dataclasses.replace(moe_layers.SIZES, domain_size=MOST // 2 or None)

    @parameterized.product(num_chunks=[1, 2], remat=[None, "dispatch", "experts"])
    def test_moe_mlp(self, num_chunks, remat):
        p = moe_layers.parameters(biases=False, dtype=jnp.bfloat16)
        ids = testing.merge_ranks(testing.routings(self.sizes)["uniform"])
        floats = p.floats[:4]

        def by_hand(x, ids, weights, w_up, w_down):
            sent = self.sizes.dispatch(x, ids, weights)
            y = jax_ep.grouped_mlp(
                sent.rows, w_up, w_down, sent.group_sizes, sent.row_weights, activation="swiglu"
            )
            return jax_ep.combine(y, sent.plan, None)

        def call(x, ids, weights, w_up, w_down):
            return jax_ep.moe_mlp(
                x,
                ids,
                weights,
                w_up,
                w_down,
                axis_name="expert",
                num_chunks=num_chunks,
                remat=remat,
                nvlink_domain_size=self.sizes.domain_size,
            )[0]

        def value_and_gradients(f):
            f = testing.sharded(f, self.sizes.mesh)
            loss = lambda x, weights, w_up, w_down: jnp.sum(
                jnp.sin(f(x, ids, weights, w_up, w_down).astype(jnp.float32))
            )
            return jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))(*floats)

        (value, got), (expected_value, expected) = map(value_and_gradients, (call, by_hand))
        np.testing.assert_allclose(value, expected_value, rtol=1e-2)
        for name, a, b in zip(("x", "weights", "w_up", "w_down"), got, expected, strict=True):
            if num_chunks == 1:
                testing.assert_bitwise(a, b, name)
            else:  # weight gradients are summed chunk by chunk
                testing.assert_close(np.asarray(a), np.asarray(b), name, steps=8)

    @tier.needs_gpus(4)
    def test_combine_of_domains_shows(self):
        """Otherwise the test above would pass if the option were lost."""
        p = moe_layers.parameters(biases=False, dtype=jnp.bfloat16)
        ids = testing.merge_ranks(testing.routings(self.sizes)["uniform"])
        floats = (*p.floats[:4], None, None)
        domains = {"nvlink_domain_size": self.sizes.domain_size}
        one, _ = moe_layers.layer()(ids, *floats)
        two, _ = moe_layers.layer(**domains)(ids, *floats)
        self.assertTrue((np.asarray(one) != np.asarray(two)).any())

    def module(self, **options):
        sizes = (32, 16, 2 * MOST, min(4, MOST))
        return jax_ep.nnx.MoE(*sizes, dtype=jnp.bfloat16, **options, rngs=nnx.Rngs(0))

    @tier.needs_gpus(4)
    def test_modules_take_the_hosts_of_their_mesh(self):
        """In each way that a layer knows its mesh; no bit differs from the option's."""
        mesh, size = testing.expert_mesh(), MOST // 2
        x = testing.random_values(np.random.default_rng(0), (8 * MOST, 32), jnp.bfloat16)
        expected, _ = self.module(mesh=mesh, nvlink_domain_size=size)(x)
        one_level, _ = self.module(mesh=mesh)(x)
        self.assertTrue((np.asarray(expected) != np.asarray(one_level)).any())
        with on_hosts(lambda index: index // size):
            testing.assert_bitwise(self.module(mesh=mesh)(x)[0], expected)
            with jax.set_mesh(mesh):
                layer = self.module()
                testing.assert_bitwise(layer(x)[0], expected)
                testing.assert_bitwise(nnx.jit(lambda layer, x: layer(x)[0])(layer, x), expected)
                graph, state = nnx.split(layer)
                inside = lambda state, x: nnx.merge(graph, state)(x)[0]
                specs = nnx.get_partition_spec(state)
                run = jax.shard_map(inside, in_specs=(specs, P("expert")), out_specs=P("expert"))
                testing.assert_bitwise(jax.jit(run)(state, x), expected)

    @parameterized.parameters(("2 + 2 + 4", (0, 0, 1, 1, 2, 2, 2, 2), 2), ("one", (0,) * 8, None))
    @tier.only_on_cpu
    def test_hosts_of_other_sizes(self, _, hosts, size):
        with on_hosts(hosts.__getitem__):
            config = with_domains(self.module().config, testing.expert_mesh())
        self.assertEqual(config.nvlink_domain_size, size)

    @tier.only_on_cpu
    def test_split_hosts_are_refused(self):
        mesh = testing.expert_mesh()
        with (
            on_hosts(lambda index: index % 2),
            self.assertRaisesRegex(
                ValueError, r"those of each host next to each other\. .*make_mesh\(\(8,\)"
            ),
        ):
            self.module(mesh=mesh)(jnp.zeros((MOST, 32)))


@contextlib.contextmanager
def on_hosts(host_of_index):
    """Pretends to layers that devices are on several hosts."""
    with unittest.mock.patch.object(
        domains, "host_of", lambda device: host_of_index(jax.devices().index(device))
    ):
        yield


class QuantizedTest(parameterized.TestCase):
    @parameterized.parameters(quant.Fp8Block128(), quant.Fp8Row())
    def test_rows_of_eight_bits(self, format):
        sizes = sizes_of(RANKS[-1], HALF, hidden=256)
        ids = testing.routings(sizes)["repeats"]
        x = testing.random_values(np.random.default_rng(0), (*ids.shape[:2], sizes.hidden))

        def send(x, ids):
            quantized = quant.quantize(x, format, implementation="xla")
            rows = sizes.dispatch(quantized, ids, None).rows
            return quant.dequantize(rows, jnp.float32), quant.dequantize(quantized, jnp.float32)

        rows, sent = testing.sharded(send, sizes.mesh)(*testing.merge_ranks((x, ids)))
        sent = np.asarray(sent).reshape(x.shape)
        expected, _ = numpy_moe.dispatch(sent, None, sizes.plans(ids))
        testing.assert_bitwise(np.asarray(rows).reshape(expected.shape), expected)


class ArgumentsTest(parameterized.TestCase):
    @parameterized.parameters(0, 3, "2", 2.5)
    def test_sizes_that_do_not_fit(self, size):
        sizes = dataclasses.replace(sizes_of(RANKS[-1], None), domain_size=size)
        ids = jnp.zeros((RANKS[-1] * sizes.num_tokens, sizes.top_k), jnp.int32)
        with self.assertRaisesRegex((ValueError, TypeError), "jax_ep.dispatch: nvlink_domain_size"):
            testing.sharded(
                lambda ids: sizes.dispatch(sizes.nothing(), ids, None).plan, sizes.mesh
            )(ids)

    @parameterized.parameters((None, False), (2.0, False), (None, True))
    @tier.only_on_cpu
    def test_many_rows_without_a_capacity_warn(self, capacity_factor, one_level):
        """Rows of 32768 tokens of 7168 from each of up to 8 ranks, 8 experts per token."""
        tokens, hidden, num_ranks = 1 << 15, 7168, RANKS[-1]

        def send(x, ids):
            return jax_ep.dispatch(
                x,
                ids,
                None,
                num_experts=8 * num_ranks,
                axis_name="expert",
                capacity_factor=capacity_factor,
                nvlink_domain_size=None if one_level else 1,
            ).rows

        arguments = (
            jax.ShapeDtypeStruct((tokens * num_ranks, hidden), jnp.bfloat16),
            jax.ShapeDtypeStruct((tokens * num_ranks, 8), jnp.int32),
        )
        primitive._warned.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            jax.eval_shape(testing.sharded(send, testing.expert_mesh(num_ranks)), *arguments)
        messages = [str(warning.message) for warning in caught]
        expects = capacity_factor is None and not one_level
        self.assertEqual(sum("Give capacity_factor" in m for m in messages), int(expects))


if __name__ == "__main__":
    absltest.main()
