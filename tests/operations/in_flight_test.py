"""Transfers in flight: the bits of those that are not, values and gradients, whatever runs beside them."""

from __future__ import annotations

import functools

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax import lax
from testing import Sizes

import jax_ep
from jax_ep import quant

MOST = testing.NUM_DEVICES
SIZES = {
    "usual": Sizes(MOST, num_local=2, num_tokens=6, top_k=4),
    "one_rank": Sizes(1, num_local=8, num_tokens=12, top_k=3),
    "dropping": Sizes(MOST, num_local=2, num_tokens=8, top_k=3, row_align=2, recv_capacity=24),
    "many_tokens": Sizes(MOST, num_local=2, num_tokens=150, top_k=4, hidden=32),
}
if MOST >= 4:
    SIZES["domains"] = Sizes(MOST, num_local=2, num_tokens=20, top_k=4, domain_size=MOST // 2)


def beside(z):
    """Runs beside a transfer, and is exact."""
    return jnp.roll(-2 * z, 1, axis=0)


def expand(rows, plan):
    """The experts: NaN where there is no token, otherwise a power of two of each row."""
    source = plan.row_source[:, :1]
    return jnp.where(source[:, :1] >= 0, rows * 2, jnp.nan).astype(rows.dtype)


def start(sizes, x, weights, ids, **options):
    return jax_ep.dispatch_start(
        x,
        ids,
        weights,
        num_experts=sizes.num_experts,
        axis_name="expert",
        row_align=sizes.row_align,
        recv_capacity=sizes.recv_capacity,
        nvlink_domain_size=sizes.domain_size,
        **options,
    )


def one_after_another(sizes, x, weights, z, ids):
    sent = sizes.dispatch(x, ids, weights)
    out = jax_ep.combine(expand(sent.rows, sent.plan), sent.plan, sent.row_weights)
    return out, beside(z), beside(beside(z)), sent


def in_flight(sizes, x, weights, z, ids, *, lane=1):
    sending, first = jax_ep.overlap(start(sizes, x, weights, ids, lane=lane), beside, z)
    sent = jax_ep.dispatch_done(sending)
    y = expand(sent.rows, sent.plan)
    returning = jax_ep.combine_start(y, sent.plan, sent.row_weights, lane=lane)
    returning, second = jax_ep.overlap(returning, beside, first)
    return jax_ep.combine_done(returning), first, second, sent


def two_at_once(sizes, x, weights, z, ids, *, lanes):
    """The same, and the same of -x in flight with it."""
    ours = start(sizes, x, weights, ids, lane=lanes[0])
    other = start(sizes, -x, weights, ids, lane=lanes[1])
    other, first = jax_ep.overlap(other, beside, z)
    ours, second = jax_ep.overlap(ours, beside, first)
    sent, sent_too = jax_ep.dispatch_done(ours), jax_ep.dispatch_done(other)
    returning = [
        jax_ep.combine_start(expand(s.rows, s.plan), s.plan, s.row_weights, lane=lane)
        for s, lane in zip((sent, sent_too), lanes, strict=True)
    ]
    out, negative = (jax_ep.combine_done(each) for each in reversed(returning))
    return (out - negative) / -2, first, second, sent


def values_and_gradients(layer, sizes):
    """(ids, out_bar, x, weights, z) -> results and gradients, of all ranks."""

    def f(ids, out_bar, x, weights, z):
        def results(x, weights, z):
            out, first, second, sent = layer(sizes, x, weights, z, ids)
            rows = jnp.where(sent.plan.row_source[:, :1] >= 0, sent.rows, 0)
            return (out, first, second), (rows, sent.row_weights, sent.plan)

        values, backward, rest = jax.vjp(results, x, weights, z, has_aux=True)
        return values, rest, backward((out_bar,) * 3)

    return f


def arguments(sizes, ids, dtype, seed=0):
    rng = np.random.default_rng(seed)
    shape = sizes.num_ranks, sizes.num_tokens
    out_bar, x, z = (testing.random_values(rng, (*shape, sizes.hidden), dtype) for _ in range(3))
    weights = rng.random((*shape, sizes.top_k), np.float32)
    return testing.merge_ranks((ids, out_bar, x, weights, z))


def assert_same(got, expected, message):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        positive = (a + 0 if jnp.issubdtype(a.dtype, jnp.floating) else a for a in (one, other))
        testing.assert_bitwise(*positive, message)  # XLA's own sums have zeros of either sign


class BitsTest(parameterized.TestCase):
    @parameterized.product(name=list(SIZES), dtype=[jnp.bfloat16, jnp.float32])
    def test_values_and_gradients(self, name, dtype):
        sizes = SIZES[name]
        layers = one_after_another, in_flight, functools.partial(in_flight, lane=3)
        programs = [
            testing.sharded(values_and_gradients(layer, sizes), sizes.mesh) for layer in layers
        ]
        routings = testing.routings(sizes, seed=1)
        for kind in routings if dtype == jnp.float32 else ("uniform", "half", "to_one_rank"):
            ids = routings[kind]
            expected, *got = (program(*arguments(sizes, ids, dtype)) for program in programs)
            for each in got:
                assert_same(each, expected, kind)
        jax_ep.check()

    def test_without_weights(self):
        sizes = SIZES["usual"]
        results = []
        for layer in (one_after_another, in_flight):

            def f(ids, out_bar, x, z, layer=layer):
                run = lambda x: layer(sizes, x, None, z, ids)[0]
                out, backward = jax.vjp(run, x)
                return out, backward(out_bar)

            ids, out_bar, x, _, z = arguments(sizes, testing.routings(sizes)["repeats"], np.float32)
            results.append(testing.sharded(f, sizes.mesh)(ids, out_bar, x, z))
        assert_same(*results, "")

    @parameterized.parameters((1, 1), (1, 2), (3, 2))
    def test_two_at_once(self, *lanes):
        sizes = SIZES["many_tokens"]
        layers = one_after_another, functools.partial(two_at_once, lanes=lanes)
        programs = [
            testing.sharded(values_and_gradients(layer, sizes), sizes.mesh) for layer in layers
        ]
        routings = testing.routings(sizes, seed=2)
        for kind in ("uniform", "repeats", "to_one_expert"):
            ids = routings[kind]
            expected, got = (program(*arguments(sizes, ids, np.float32)) for program in programs)
            assert_same(got[:2], expected[:2], kind)
            for one, other in zip(got[2], expected[2], strict=True):
                testing.assert_close(one, other, kind)
        jax_ep.check()

    @parameterized.parameters("scan", "checkpoint", "vmap")
    def test_transformations(self, how):
        sizes = SIZES["usual"]
        results = []
        for layer in (one_after_another, in_flight):

            def transformed(sizes, x, weights, z, ids, layer=layer):
                def run(x, weights, z):
                    return layer(sizes, x, weights, z, ids)

                if how == "checkpoint":
                    return jax.checkpoint(run)(x, weights, z)
                both = jax.tree.map(lambda a: jnp.stack([a, a]), (x, weights, z))
                if how == "vmap":
                    found = jax.vmap(run)(*both)
                else:
                    found = lax.scan(lambda _, given: (None, run(*given)), None, both)[1]
                return jax.tree.map(lambda a: a[1], found)

            program = testing.sharded(
                values_and_gradients(transformed, sizes), sizes.mesh, check_vma=how != "scan"
            )
            ids = testing.routings(sizes)["half"]
            results.append(program(*arguments(sizes, ids, jnp.bfloat16)))
        assert_same(*results, how)
        jax_ep.check()


class ErrorsTest(parameterized.TestCase):
    def problem(self, function, error):
        sizes = SIZES["usual"]
        ids, _, x, weights, _ = arguments(sizes, testing.routings(sizes)["uniform"], np.float32)
        f = functools.partial(function, sizes)
        with self.assertRaises(error) as raised:
            testing.sharded(f, sizes.mesh)(x, weights, ids)
        return str(raised.exception)

    @parameterized.parameters(0, 4)
    def test_lane(self, lane):
        message = self.problem(functools.partial(start, lane=lane), jax_ep.ArgumentError)
        self.assertIn(f"jax_ep.dispatch_start: lane={lane}; expected", message)

    def test_quantized_rows(self):
        def f(sizes, x, weights, ids):
            return start(sizes, quant.quantize(x, quant.Fp8Row()), weights, ids)

        self.assertIn("x is quantized", self.problem(f, jax_ep.DtypeError))

    def test_another_transfer(self):
        def f(sizes, x, weights, ids):
            return jax_ep.combine_done(start(sizes, x, weights, ids))

        message = self.problem(f, jax_ep.ArgumentError)
        self.assertIn("in_flight is a dispatch; expected a combine", message)

    @parameterized.parameters(jax_ep.dispatch_done, jax_ep.combine_done)
    def test_something_else(self, done):
        message = self.problem(lambda sizes, x, *_: done(x), jax_ep.DtypeError)
        self.assertIn("expected the jax_ep.InFlight that", message)

    def test_overlap_of_something_else(self):
        f = lambda sizes, x, *_: jax_ep.overlap(x, beside, x)
        self.assertIn("jax_ep.overlap: in_flight is a", self.problem(f, jax_ep.DtypeError))


if __name__ == "__main__":
    absltest.main()
