"""dispatch and redispatch of quantized rows: the bytes of rows that are quantized where they arrive."""

from __future__ import annotations

import dataclasses
import functools

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
import programs
import tier
from absl.testing import absltest, parameterized
from quantized import Fp8Block32

import jax_ep
from jax_ep import quant

RANKS, EXPERTS = testing.NUM_DEVICES, 2 * testing.NUM_DEVICES
FORMATS = (
    quant.Fp8Block128(),
    quant.Fp8Row(jnp.float8_e5m2),
    quant.MxFp8(),
    quant.MxFp8(jnp.float8_e5m2),
    quant.MxFp4(),
    quant.NvFp4(),
)
TENSOR_SCALE = 2.0**-10


def quantize(x, format):
    """Quantizes by XLA where no kernel does."""
    has_kernel = isinstance(format, quant.Fp8Block128 | quant.Fp8Row)
    return quant.quantize(
        x,
        format,
        tensor_scale=TENSOR_SCALE if format.has_tensor_scale else None,
        implementation=None if has_kernel else "xla",
    )


def sharded_rows(rows):
    """Leaves out a tensor's scale, which has no axis."""
    return dataclasses.replace(rows, tensor_scale=None)


def problem(hidden=288):
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
        rows = quantize(x, format)
        quantized, plain = send(rows, ids, weights), send(x, ids, weights)
        again = jax_ep.redispatch(rows, quantized.plan, weights)
        expected = quantize(plain.rows, format)
        quantized, again = (
            dataclasses.replace(sent, rows=sharded_rows(sent.rows)) for sent in (quantized, again)
        )
        return quantized, again, plain, sharded_rows(expected)

    return testing.sharded(compute, testing.expert_mesh())


class QuantizedDispatchTest(parameterized.TestCase):
    @parameterized.product(format=FORMATS, hidden=[288, 128])
    def test_rows_are_those_that_are_quantized_where_they_arrive(self, format, hidden):
        quantized, again, plain, expected = both_ways(format)(*problem(hidden))
        self.assertEqual(quantized.rows.format, format)
        jax.tree.map(testing.assert_bitwise, again.rows, quantized.rows)
        jax.tree.map(testing.assert_bitwise, quantized.plan.arrays, plain.plan.arrays)
        testing.assert_bitwise(quantized.row_weights, plain.row_weights)
        # A NaN is in the scale: the values of its block may be any.
        scales = np.asarray(expected.scales, np.float32)
        is_finite = np.isfinite(scales).all(1)
        bits = lambda values: np.asarray(values)[is_finite].view(np.uint8)
        testing.assert_bitwise(bits(quantized.rows.values), bits(expected.values))
        is_row = np.asarray(plain.plan.row_source)[:, 0] >= 0
        testing.assert_bitwise(
            np.asarray(quantized.rows.scales, np.float32),  # as `scales`: a GPU makes another NaN
            np.where(is_row[:, None], scales, np.float32(1)),
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
            (resend_fewer, jax_ep.ArgumentError, r"\(4, 288\).*expected \[8, hidden\]"),
            (resend_bits, jax_ep.DtypeError, "x has dtype uint32"),
        ):
            with self.assertRaisesRegex(error, message):
                testing.sharded(compute, testing.expert_mesh())(x, ids, weights)

    @tier.only_on_cpu
    def test_kernels_take_values_and_scales(self):
        """Transfers take what quantize writes."""
        shapes = programs.struct((8 * RANKS, 7168)), *problem()[1:]
        types = (
            "7168xf8E4M3FN 56xf32",
            "7168xf8E5M2 1xf32",
            "7168xf8E4M3FN 224xf8E8M0FNU",
            "7168xf8E5M2 224xf8E8M0FNU",
            "7168xf4E2M1FN 224xf8E8M0FNU",
            "7168xf4E2M1FN 448xf8E4M3FN",
        )
        for format, of_rows in zip(FORMATS, types, strict=True):
            program = programs.lower_for_cuda(both_ways(format), *shapes)
            values, scales = of_rows.split()
            calls = {
                call.target.split(".")[1]: call for call in program.calls if values in str(call)
            }
            for name in ("dispatch", "redispatch"):
                self.assertEqual(calls[name].operands[:2], (f"8x{values}", f"8x{scales}"))
                num_rows = 8 * RANKS * 2 + 8
                rows = f"{num_rows}x{values}", f"{num_rows}x{scales}"
                self.assertEqual(calls[name].results[:2], rows)
                self.assertEqual(calls[name].attributes["is_quantized"], ("bool", True))

    @tier.only_on_cpu
    def test_kernels_do_not_take_other_formats(self):
        shapes = programs.struct((8 * RANKS, 256)), *problem()[1:]
        with programs.fallback_warnings() as messages:
            program = programs.lower_for_cuda(both_ways(Fp8Block32()), *shapes)
        self.assertNotIn("8x256xf8E4M3FN", str(program.calls))
        self.assertRegex(" ".join(messages), "rows of 256 values in float8_e4m3fn have 8 scales in")


if __name__ == "__main__":
    absltest.main()
