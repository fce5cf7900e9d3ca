"""dispatch and redispatch of quantized rows: the bytes of rows that are quantized where they arrive."""

from __future__ import annotations

import functools

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
import programs
import tier
from absl.testing import absltest, parameterized

import jax_ep
from jax_ep import quant

RANKS, EXPERTS = testing.NUM_DEVICES, 2 * testing.NUM_DEVICES
FORMATS = (quant.Fp8Block128(), quant.Fp8Row(jnp.float8_e5m2))


def problem(hidden=272):
    """x of all ranks, one row with a NaN, ids and weights."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8 * RANKS, hidden)).astype(np.float32)
    x[3, 5] = np.nan
    ids = rng.integers(-1, EXPERTS, (8 * RANKS, 2)).astype(np.int32)
    return x, ids, rng.random(ids.shape, np.float32)


@functools.cache
def both_ways(format):
    """(x, ids, weights) -> what is sent quantized, sent again, and quantized where it arrives."""

    def compute(x, ids, weights):
        send = functools.partial(
            jax_ep.dispatch, num_experts=EXPERTS, axis_name="expert", row_align=4
        )
        rows = quant.quantize(x, format)
        quantized, plain = send(rows, ids, weights), send(x, ids, weights)
        again = jax_ep.redispatch(rows, quantized.plan, weights)
        return quantized, again, plain, quant.quantize(plain.rows, format)

    return testing.sharded(compute, testing.expert_mesh())


class QuantizedDispatchTest(parameterized.TestCase):
    @parameterized.product(format=FORMATS, hidden=[272, 128])
    def test_rows_are_those_that_are_quantized_where_they_arrive(self, format, hidden):
        quantized, again, plain, expected = both_ways(format)(*problem(hidden))
        self.assertEqual(quantized.rows.format, format)
        jax.tree.map(testing.assert_bitwise, again.rows, quantized.rows)
        jax.tree.map(testing.assert_bitwise, quantized.plan.arrays, plain.plan.arrays)
        testing.assert_bitwise(quantized.row_weights, plain.row_weights)
        # A NaN is in the scale: the values of its block may be any.
        is_finite = np.isfinite(np.asarray(expected.scales)).all(1)
        bits = lambda values: np.asarray(values)[is_finite].view(np.uint8)
        testing.assert_bitwise(bits(quantized.rows.values), bits(expected.values))
        is_row = np.asarray(plain.plan.row_source)[:, 0] >= 0
        testing.assert_bitwise(
            quantized.rows.scales, np.where(is_row[:, None], np.asarray(expected.scales), 1)
        )

    def test_rows_have_no_derivative(self):
        def loss(x, ids, weights):
            rows = quant.Quantized(
                quant.quantize(jax.lax.stop_gradient(x), FORMATS[0]).values, x[:, :3], FORMATS[0]
            )
            sent = jax_ep.dispatch(rows, ids, weights, num_experts=EXPERTS, axis_name="expert")
            return sent.rows.scales

        compute = testing.sharded(loss, testing.expert_mesh())
        with self.assertRaisesRegex(jax_ep.UnavailableError, "dispatch: it has no derivative"):
            jax.grad(lambda x, *others: compute(x, *others).sum())(*problem())

    def test_rows_that_do_not_fit(self):
        x, ids, weights = problem()
        send = functools.partial(jax_ep.dispatch, num_experts=EXPERTS, axis_name="expert")

        def resend_fewer(x, ids, weights):
            plan = send(x, ids, weights).plan
            return jax_ep.redispatch(quant.quantize(x[:4], FORMATS[1]), plan).rows.scales

        def resend_bits(x, ids, weights):
            return send(jax.lax.bitcast_convert_type(x, jnp.uint32), ids, weights).rows

        for compute, error, message in (
            (resend_fewer, jax_ep.ArgumentError, r"\(4, 272\).*expected \[8, hidden\]"),
            (resend_bits, jax_ep.DtypeError, "x has dtype uint32"),
        ):
            with self.assertRaisesRegex(error, message):
                testing.sharded(compute, testing.expert_mesh())(x, ids, weights)

    @tier.only_on_cpu
    def test_kernels_take_values_and_scales(self):
        """Transfers take what quantize writes."""
        shapes = programs.struct((8 * RANKS, 7168)), *problem()[1:]
        program = programs.lower_for_cuda(both_ways(FORMATS[0]), *shapes)
        calls = {
            call.target.split(".")[1]: call for call in program.calls if "7168xf8" in str(call)
        }
        rows = (f"{8 * RANKS * 2 + 8}x7168xf8E4M3FN", f"{8 * RANKS * 2 + 8}x56xf32")
        for name in ("dispatch", "redispatch"):
            self.assertEqual(calls[name].operands[:2], ("8x7168xf8E4M3FN", "8x56xf32"))
            self.assertEqual(calls[name].results[:2], rows)
            self.assertEqual(calls[name].attributes["is_quantized"], ("bool", True))


if __name__ == "__main__":
    absltest.main()
