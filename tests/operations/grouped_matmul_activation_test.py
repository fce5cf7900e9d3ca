"""The matmuls with an epilogue against numpy, primitive by primitive, with poison wherever nothing may be read."""

from __future__ import annotations

import functools

import testing  # isort: skip

import grouped
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from grouped import ACTIVATIONS, CLAMPED, GATED, GROUP_SIZES

from jax_ep._src.core import checks
from jax_ep._src.matmul import grouped_matmul_activation
from jax_ep._src.matmul.params import GroupedMatmulActivationParams

K, F = 16, 24
# (rows, matrices): each pair has its own kernel.
DTYPES = ((jnp.bfloat16, jnp.bfloat16), (jnp.bfloat16, np.float32), (np.float32, np.float32))


def params(activation, num_sms=0):
    implementation = checks.implementation("test", None)
    return GroupedMatmulActivationParams(activation, num_sms, implementation)


@functools.cache
def forward(activation, keep=True, **options):
    keep = keep and activation != "none"  # which has nothing to keep

    def f(lhs, rhs, sizes, bias, weights):
        return grouped_matmul_activation.bind_activation(
            lhs, rhs, sizes, bias, weights, params(activation, **options), keep_pre_activation=keep
        )

    return jax.jit(f)


@functools.cache
def backward(activation):
    return jax.jit(
        lambda *args: grouped_matmul_activation.bind_activation_gradient(
            *args, params=params(activation)
        )
    )


def problem(
    sizes, activation, *, num_rows=32, dtype=np.float32, rhs_dtype=None, k=K, f=F, given=(1, 1)
):
    """(lhs, rhs, sizes, bias, weights) forward, (out_bar, rhs, sizes, pre, weights) backward, and the tail's begin."""
    rng = np.random.default_rng(0)
    sizes = np.array(sizes, np.int32)
    n = 2 * f if activation in GATED else f
    draw = lambda *shape: rng.standard_normal(shape)
    end = grouped.end_of(sizes, num_rows)
    lhs, out_bar, pre = draw(num_rows, k), draw(num_rows, k), draw(num_rows, n)
    weights = rng.random(num_rows).astype(np.float32)
    for array in (lhs, out_bar, pre, weights):
        array[end:] = np.nan
    up, down = (
        (draw(len(sizes), *shape) / 2).astype(rhs_dtype or dtype) for shape in ((k, n), (f, k))
    )
    bias = draw(len(sizes), n).astype(np.float32)
    has_bias, has_weights = given
    weights = weights if has_weights else None
    return (
        (lhs.astype(dtype), up, sizes, bias if has_bias else None, weights),
        (out_bar.astype(dtype), down, sizes, pre.astype(dtype), weights),
        end,
    )


def check_gradient(activation, arguments, end, message="", *, steps):
    """The dots are of sums that were rounded to the rows' dtype, and are float32 themselves."""
    got = backward(activation)(*arguments)
    *expected, magnitudes = grouped.matmul_activation_gradient(activation, *arguments)
    for a, b in zip(got[:2], expected[:2], strict=True):
        testing.assert_close(a[:end], b[:end], message, steps=steps)
    eps = max(float(jnp.finfo(got[0].dtype).eps), 64 * float(np.finfo(np.float32).eps))
    errors = np.abs(np.asarray(got[2], np.float64) - expected[2])
    bound = eps * magnitudes + 1e-30
    assert (errors[:end] <= bound[:end]).all(), message
    return got


class ActivationTest(parameterized.TestCase):
    @parameterized.product(activation=("none", *ACTIVATIONS, CLAMPED), dtype=testing.ROW_DTYPES)
    def test_every_kind_of_group_sizes(self, activation, dtype):
        for kind, sizes in GROUP_SIZES.items():
            arguments, _, end = problem(sizes, activation, dtype=dtype)
            results = forward(activation)(*arguments)
            expected = grouped.matmul_activation(activation, *arguments)
            for got, want in zip(results, expected, strict=True):
                if got is None:
                    continue
                self.assertEqual(got.dtype, dtype)
                testing.assert_close(got[:end], want[:end], kind, steps=16)
                if jax.default_backend() == "cpu":  # the reference marks what nobody may read
                    self.assertTrue(np.isnan(np.asarray(got[end:], np.float32)).all())

    @parameterized.product(
        given=[(0, 0), (0, 1), (1, 0)], activation=("none", "relu2", "swiglu", CLAMPED)
    )
    def test_optional_operands(self, given, activation):
        arguments, _, end = problem(GROUP_SIZES["usual"], activation, given=given)
        out, pre = forward(activation)(*arguments)
        expected = grouped.matmul_activation(activation, *arguments)
        testing.assert_close(out[:end], expected[0][:end])
        if pre is not None:
            testing.assert_close(pre[:end], expected[1][:end])

    @parameterized.product(
        dtype=[jnp.bfloat16, jnp.float16], activation=["relu2", "swiglu", CLAMPED]
    )
    def test_reads_the_rounded_pre_activation(self, dtype, activation):
        """The output is the kept pre-activation's, rounded once: half a step, and float32's errors."""
        arguments, _, end = problem(GROUP_SIZES["full"], activation, dtype=dtype)
        out, pre = forward(activation)(*arguments)
        exact = grouped.activate(activation, np.asarray(pre)[:end]) * arguments[4][:end, None]
        info = jnp.finfo(dtype)
        bound = float(info.eps) * 0.51 * np.abs(exact) + float(info.tiny)
        self.assertTrue((np.abs(np.asarray(out[:end], np.float64) - exact) <= bound).all())

    @parameterized.parameters(*testing.ROW_DTYPES)
    def test_options_change_no_bit(self, dtype):
        arguments, _, end = problem(GROUP_SIZES["full"], "swiglu", dtype=dtype)
        out, _ = forward("swiglu")(*arguments)
        for options in {"keep": False}, {"num_sms": 3}:
            again, _ = forward("swiglu", **options)(*arguments)
            testing.assert_bitwise(again[:end], np.asarray(out)[:end])

    @parameterized.product(activation=("silu", "gelu", "swiglu", "geglu"), dtypes=DTYPES)
    @np.errstate(over="ignore")
    def test_squares_overflow(self, activation, dtypes):
        """Pre-activations of +-1e20, and others that make a finite product of that."""
        dtype, rhs_dtype = dtypes
        (lhs, rhs, sizes, _, weights), _, _ = problem(
            GROUP_SIZES["full"], activation, dtype=dtype, rhs_dtype=rhs_dtype
        )
        lhs[:], lhs[:, 0] = 0, 1e10
        rhs[:, 0, :F] = np.sign(rhs[:, 0, :F].astype(np.float32)) * 1e10
        rhs[:, 0, F:] = 1e-20
        arguments = lhs, rhs, sizes, None, weights
        out, pre = forward(activation)(*arguments)
        expected = grouped.matmul_activation(activation, *arguments)
        testing.assert_close(out, expected[0], steps=16)
        testing.assert_close(pre, expected[1], steps=16)

    @parameterized.product(activation=("silu", "swiglu"), rhs_dtype=[np.float16, np.float32])
    def test_sums_that_float16_does_not_have(self, activation, rhs_dtype):
        (lhs, rhs, sizes, _, _), _, _ = problem(
            GROUP_SIZES["full"], activation, dtype=np.float16, rhs_dtype=rhs_dtype
        )
        lhs[:], lhs[:, 0] = 0, 1e4
        rhs[:, 0, :F], rhs[:, 0, F:] = 1e4, 1e-4
        for result in forward(activation)(lhs, rhs, sizes, None, None):
            np.testing.assert_array_equal(np.asarray(result)[:, :F], np.inf)

    @parameterized.parameters(jnp.bfloat16, jnp.float16)
    def test_none_rounds_once(self, dtype):
        arguments, _, end = problem(GROUP_SIZES["full"], "none", dtype=dtype)
        out, _ = forward("none")(*arguments)
        expected, _ = grouped.matmul_activation("none", *arguments)
        testing.assert_sums(out[:end], expected[:end], np.abs(expected[:end]) + 8, K)


class GradientTest(parameterized.TestCase):
    @parameterized.product(activation=(*ACTIVATIONS, CLAMPED), dtype=testing.ROW_DTYPES)
    def test_every_kind_of_group_sizes(self, activation, dtype):
        for kind, sizes in GROUP_SIZES.items():
            _, arguments, end = problem(sizes, activation, dtype=dtype)
            results = check_gradient(activation, arguments, end, kind, steps=32)
            self.assertEqual([r.dtype for r in results], [dtype, dtype, jnp.float32])
            for got in results:
                if jax.default_backend() == "cpu":
                    self.assertTrue(np.isnan(np.asarray(got[end:], np.float32)).all())

    @parameterized.parameters("relu", "geglu", CLAMPED)
    def test_without_weights(self, activation):
        _, arguments, end = problem(GROUP_SIZES["usual"], activation, given=(0, 0))
        check_gradient(activation, arguments, end, steps=16)

    @parameterized.product(activation=("silu", "swiglu"), dtypes=DTYPES)
    @np.errstate(over="ignore")
    def test_squares_overflow(self, activation, dtypes):
        """Not of gelu: there the reference's own slope is NaN."""
        dtype, rhs_dtype = dtypes
        _, arguments, end = problem(
            GROUP_SIZES["full"], activation, dtype=dtype, rhs_dtype=rhs_dtype
        )
        pre = arguments[3]
        pre[:, :F] = np.sign(pre[:, :F].astype(np.float32)) * 1e20
        pre[:, F:] = 1e-10
        check_gradient(activation, arguments, end, steps=32)


class OtherTest(parameterized.TestCase):
    @parameterized.parameters(
        ([130, 128, 1, 0, 127, 256], 700, 40, 136),
        ([300, 0, 100], 400, 136, 264),
        ([1] * 9, 9, 8, 8),
        ([3], 3, 7, 2),
        ([0, 1], 1, 1, 129),
    )
    def test_other_shapes(self, sizes, num_rows, k, f):
        """Dots are those of blocks of 128 columns, the last one narrower."""
        for activation, dtype in (("swiglu", np.float32), ("gelu", jnp.bfloat16)):
            arguments, of_backward, end = problem(
                sizes, activation, num_rows=num_rows, k=k, f=f, dtype=dtype
            )
            got = forward(activation)(*arguments)
            expected = grouped.matmul_activation(activation, *arguments)
            for a, b in zip(got, expected, strict=True):
                testing.assert_close(a[:end], b[:end], steps=64)
            got = check_gradient(activation, of_backward, end, steps=64)
            self.assertEqual(got[2].shape, (num_rows, -(-f // 128)))

    @parameterized.product(
        activation=("none", *ACTIVATIONS),
        dtype=[jnp.bfloat16, jnp.float16],
        f=[136, 264],
        sizes_and_rows=[([130, 128, 1, 0, 127, 256], 700), ([70, 5, 0, 64, 1, 17], 180)],
    )
    def test_tiles(self, activation, dtype, f, sizes_and_rows):
        """More than one tile, none of them whole, with many and with few rows per group."""
        sizes, num_rows = sizes_and_rows
        arguments, of_backward, end = problem(
            sizes, activation, num_rows=num_rows, k=200, f=f, dtype=dtype
        )
        got = forward(activation)(*arguments)
        expected = grouped.matmul_activation(activation, *arguments)
        for a, b in zip(got, expected, strict=True):
            if a is not None:
                testing.assert_close(a[:end], b[:end], steps=64)
        if activation == "none":
            return
        check_gradient(activation, of_backward, end, steps=64)

    @parameterized.product(
        dtype=[jnp.bfloat16, jnp.float16], sizes=[GROUP_SIZES["usual"], [70, 60]]
    )
    def test_master_weights_are_rounded(self, dtype, sizes):
        """A float32 rhs gives what one in lhs's dtype gives: the bits with many rows per group, as it is
        cast, and nearly so with few, where two kernels add in different orders."""
        num_rows = 140 if len(sizes) == 2 else 32
        *both, end = problem(sizes, "swiglu", num_rows=num_rows, dtype=dtype, rhs_dtype=np.float32)
        for f, arguments in zip((forward("swiglu"), backward("swiglu")), both, strict=True):
            lhs, rhs, *others = arguments
            got, expected = f(lhs, rhs, *others), f(lhs, rhs.astype(dtype), *others)
            for a, b in zip(got, expected, strict=True):
                if len(sizes) == 2:
                    testing.assert_bitwise(a[:end], np.asarray(b)[:end])
                else:
                    testing.assert_close(a[:end], b[:end], dtype=dtype, steps=1)


if __name__ == "__main__":
    absltest.main()
