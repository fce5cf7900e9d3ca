"""The pure-JAX implementation asked for by name, its pieces, and how it behaves under JAX's global settings.

The other suites compare whatever runs on this platform with numpy; here it is `implementation="xla"` everywhere.
"""

from __future__ import annotations

import unittest.mock

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
import numpy_moe
from absl.testing import absltest, parameterized
from jax.sharding import PartitionSpec as P
from testing import Sizes

import jax_ep
from jax_ep._src.core import checks
from jax_ep._src.transfer import reference, reference_plan

SIZES = Sizes(
    testing.NUM_DEVICES, num_local=2, num_tokens=6, top_k=3, row_align=4, recv_capacity=28
)


def forward_and_backward(ids, x, weights, matrices, rows_bar, out_bar):
    """Every primitive once, by the pure-JAX implementation."""
    by_name = {"implementation": "xla"}

    def run(x, weights, matrices):
        sent = SIZES.dispatch(x, ids, weights, **by_name)
        y = jax_ep.grouped_matmul(sent.rows, matrices, sent.group_sizes, **by_name)
        out = jax_ep.combine(y, sent.plan, sent.row_weights, **by_name)
        return (sent.rows, out), (sent.row_weights, y, sent.plan)

    results, backward, aux = jax.vjp(run, x, weights, matrices, has_aux=True)
    return *results, *aux, *backward((rows_bar, out_bar))


def random_arguments(dtype, seed=0):
    rng = np.random.default_rng(seed)
    ids = testing.routings(SIZES, seed)["uniform"]
    draw = lambda *shape: testing.random_values(rng, (SIZES.num_ranks, *shape), dtype)
    x, out_bar, matrices, rows_bar = draw(6, 8), draw(6, 8), draw(2, 8, 8), draw(28, 8)
    return ids, x, testing.random_values(rng, ids.shape), matrices, rows_bar, out_bar


class NamedTest(parameterized.TestCase):
    @parameterized.parameters(*[(dtype,) for dtype in testing.ROW_DTYPES])
    def test_agrees_with_numpy(self, dtype):
        arguments = random_arguments(dtype)
        ids, x, weights, matrices, rows_bar, out_bar = arguments
        f = testing.sharded(forward_and_backward, SIZES.mesh)
        rows, out, row_weights, y, plan, *gradients = f(*testing.merge_ranks(arguments))
        plans = SIZES.plans(ids)
        testing.assert_plan(plan, plans)
        rows, out, row_weights, y, *gradients = testing.split_ranks(
            (rows, out, row_weights, y, *gradients), SIZES.num_ranks
        )
        expected = numpy_moe.dispatch(x, weights, plans)
        testing.assert_bitwise(rows, expected[0])
        testing.assert_bitwise(row_weights, expected[1])
        testing.assert_bitwise(out, numpy_moe.combine(y, plans, row_weights))
        y_bar, row_weights_bar = numpy_moe.combine_gradient(out_bar, y, plans, row_weights)
        rows_bar_sum = np.zeros(rows.shape, np.float64)
        matrices_bar = np.zeros(matrices.shape)
        for rank, plan in enumerate(plans):
            testing.assert_close(
                y[rank], numpy_moe.grouped_matmul(rows[rank], matrices[rank], plan.group_sizes)
            )
            lhs_bar, matrices_bar[rank] = numpy_moe.grouped_matmul_gradient(
                rows[rank], matrices[rank], plan.group_sizes, y_bar[rank]
            )
            rows_bar_sum[rank] = lhs_bar + rows_bar[rank].astype(np.float64)
        x_bar, weights_bar = numpy_moe.dispatch_gradient(
            rows_bar_sum.astype(dtype), row_weights_bar.astype(np.float32), plans
        )
        for name, a, b in zip("xwm", gradients, (x_bar, weights_bar, matrices_bar), strict=True):
            # relative to the largest: cancellation in a sum is not an error of the sum
            steps = 64 if name == "w" else 16
            testing.assert_close(
                a, b, name, dtype=dtype if name != "w" else jnp.float32, steps=steps
            )


class PiecesTest(parameterized.TestCase):
    @parameterized.parameters(0, 1 << 20)
    def test_exchange(self, most_gathered_bytes):
        """Small values are gathered, large ones exchanged."""
        ranks = testing.NUM_DEVICES
        values = testing.random_values(np.random.default_rng(0), (ranks, ranks, 3))
        exchange = lambda v: reference._exchange(v, checks.expert_axis("test", "expert"))
        with unittest.mock.patch.object(reference, "MOST_GATHERED_BYTES", most_gathered_bytes):
            f = testing.sharded(exchange, testing.expert_mesh())
            lowered = f.lower(testing.merge_ranks(values))
        is_gathered = most_gathered_bytes > 0
        if ranks > 1:  # alone, a rank exchanges nothing
            self.assertEqual("all_gather" in lowered.as_text(), is_gathered)
            self.assertEqual("all_to_all" in lowered.as_text(), not is_gathered)
        arrived = lowered.compile()(testing.merge_ranks(values))
        testing.assert_bitwise(testing.split_ranks(arrived, ranks), values.swapaxes(0, 1))

    @parameterized.parameters("random", "canceling", "tie", "special")
    def test_fused_multiply_add(self, kind):
        rng = np.random.default_rng(0)
        a, b, c = (testing.random_values(rng, 20000) for _ in range(3))
        if kind == "canceling":
            c = -(a * b)
        elif kind == "tie":
            a = (1 + rng.integers(0, 2**12, 20000) / 2**12).astype(np.float32)
            b = np.where(rng.random(20000) < 0.5, 1, a).astype(np.float32)
            c = (2.0**-24 * rng.choice([1, -1, 2.0**-40, -(2.0**-40), 1 + 2**-20], 20000)).astype(
                np.float32
            )
        elif kind == "special":
            values = np.float32([0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 3e38, -3e38, 2e-38])
            a, b, c = (v.ravel() for v in np.meshgrid(values, values, values))
        got = jax.jit(reference._fused_multiply_add)(a, b, c)
        testing.assert_bitwise_but_nan(got, numpy_moe.fma(a, b, c))

    @parameterized.parameters((1, 1), (3, 2), (8, 4))
    def test_kept_counts(self, num_ranks, num_local):
        """[source, destination, local expert], over every capacity from nothing to enough."""
        rng = np.random.default_rng(num_ranks)
        kept_counts = jax.jit(reference_plan.kept_counts)
        for row_align in 1, 3, 8:
            counts = rng.integers(0, 6, (num_ranks, num_ranks, num_local)).astype(np.int32)
            counts[:, 0] = 0
            counts[0, -1, 0] = 40
            for num_rows in (0, 1, 2, 5, 9, 17, 33, 64, 100, 200):
                got = np.asarray(kept_counts(counts, num_rows, row_align))
                for destination in range(num_ranks):
                    of_rank = counts[:, destination].T.tolist()
                    cap = numpy_moe.capacity_cap([sum(c) for c in of_rank], num_rows, row_align)
                    for expert, by_source in enumerate(of_rank):
                        quota = numpy_moe.source_quota(by_source, cap)
                        expected = np.minimum(by_source, quota)
                        np.testing.assert_array_equal(got[:, destination, expert], expected)

    def test_kept_counts_of_large_counts(self):
        counts = np.full((4, 4, 2), 2**24, np.int32)
        got = reference_plan.kept_counts(jnp.asarray(counts), 2**20, 128)
        np.testing.assert_array_equal(got, np.full((4, 4, 2), 2**17))


class SettingsTest(parameterized.TestCase):
    def run_layer(self):
        arguments = testing.layer_arguments()
        f = jax.shard_map(
            testing.expert_layer,
            mesh=testing.expert_mesh(),
            in_specs=P("expert"),
            out_specs=P("expert"),
        )
        return testing.value_and_gradients(f, *arguments)

    def test_x64(self):
        """64-bit types on: plans stay int32, float64 weights are computed in float32, float64 rows are refused."""
        expected = self.run_layer()
        with jax.enable_x64(True):
            for a, b in zip(self.run_layer(), expected, strict=True):
                testing.assert_close(a, b, steps=16)
            f = testing.sharded(lambda ids, x, weights: SIZES.dispatch(x, ids, weights), SIZES.mesh)
            ids = testing.merge_ranks(testing.routings(SIZES)["uniform"])
            wide = np.random.default_rng(0).random(ids.shape)
            x = np.ones((len(ids), 8), np.float32)
            sent = f(ids, x, wide)
            plans = SIZES.plans(ids.reshape(SIZES.ids_shape))
            testing.assert_plan(sent.plan, plans)
            _, expected = numpy_moe.dispatch(
                x.reshape(SIZES.num_ranks, 6, 8), wide.reshape(SIZES.ids_shape), plans
            )
            testing.assert_bitwise(sent.row_weights, testing.merge_ranks(expected))
            with self.assertRaisesRegex(TypeError, "float64"):
                f(ids, x.astype(np.float64), wide)
            with self.assertRaisesRegex(TypeError, "int64"):
                f(ids.astype(np.int64), x, wide)

    def test_debug_nans_does_not_mind_marked_tails(self):
        """moe_mlp leaves tails unspecified, which are NaN here; none of it gets out."""

        def f(ids, x, weights, matrices):
            w_up, w_down = matrices, matrices.swapaxes(1, 2)
            return jax_ep.moe_mlp(
                x, ids, weights, w_up, w_down, axis_name="expert", activation="gelu"
            )[0]

        f = jax.shard_map(
            f, mesh=testing.expert_mesh(), in_specs=P("expert"), out_specs=P("expert")
        )
        with jax.debug_nans(True):
            for value in testing.value_and_gradients(f, *testing.layer_arguments()):
                self.assertTrue(np.isfinite(value).all())

    def test_default_matmul_precision_does_not_matter(self):
        expected = self.run_layer()
        with jax.default_matmul_precision("bfloat16"):
            jax.tree.map(testing.assert_bitwise, self.run_layer(), expected)

    def test_strict_dtype_promotion(self):
        with jax.numpy_dtype_promotion("strict"):
            self.run_layer()

    def test_no_rank_promotion(self):
        with jax.numpy_rank_promotion("raise"):
            self.run_layer()

    def test_no_implicit_transfers(self):
        """Constants are made on the device: nothing is copied from the host when a compiled call runs."""
        arguments = testing.layer_arguments()
        sharding = jax.NamedSharding(testing.expert_mesh(), P("expert"))
        placed = [jax.device_put(a, sharding) for a in arguments]
        f = testing.sharded(testing.expert_layer, testing.expert_mesh())
        f(*placed)
        with jax.transfer_guard("disallow"):
            f(*placed).block_until_ready()


if __name__ == "__main__":
    absltest.main()
