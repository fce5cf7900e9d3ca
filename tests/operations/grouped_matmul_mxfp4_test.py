"""Products of float rows and MXFP4 weights, gradients and activations, against numpy in float64.

It multiplies by the dequantized weights.
"""

from __future__ import annotations

import functools
import unittest.mock

import testing  # isort: skip

import grouped
import jax
import jax.numpy as jnp
import numpy as np
import numpy_moe
import programs
import tier
from absl.testing import absltest, parameterized
from grouped import CLAMPED, GROUP_SIZES

import jax_ep
from jax_ep import quant
from jax_ep._src.matmul.grouped_matmul_mxfp4 import weights_only_lhs_gradient, weights_only_matmul
from jax_ep._src.matmul.grouped_matmul_mxfp4_activation import bind_weights_only_activation
from jax_ep._src.matmul.params import GroupedMatmulActivationParams, GroupedMatmulParams

FORMAT = quant.MxFp4()


def params(**options):
    given = dict(out_dtype=jnp.dtype(jnp.bfloat16), zero_tail=True, num_sms=0, implementation=None)
    return GroupedMatmulParams(transpose_rhs=True, **given | options)


@functools.cache
def matmul(**options):
    return jax.jit(functools.partial(weights_only_matmul, params=params(**options)))


def problem(sizes, *, num_rows=32, k=224, n=136, dtype=jnp.bfloat16, format=FORMAT):
    """Rows, weights [G, N, K], sizes, and where the tail begins; the tail of rows is NaN."""
    rng = np.random.default_rng(0)
    sizes = np.array(sizes, np.int32)
    lhs = testing.random_values(rng, (num_rows, k))
    rhs = testing.random_values(rng, (len(sizes), n, k))
    end = list(numpy_moe.group_slices(sizes, num_rows))[-1].stop
    lhs[end:] = np.nan
    rhs = quant.quantize(rhs, format, implementation="xla")  # no kernel does
    return jnp.asarray(lhs, dtype), rhs, sizes, end


def exact(weights):
    return np.asarray(quant.dequantize(weights, jnp.float32), np.float64)


@functools.cache
def lhs_gradient(**options):
    return jax.jit(functools.partial(weights_only_lhs_gradient, params=params(**options)))


def gradient_problem(sizes, *, num_rows=32, k=224, n=136, dtype=jnp.bfloat16, format=FORMAT):
    """As `problem`, with the result's gradient [M, N] in place of rows."""
    _, rhs, sizes, end = problem(sizes, num_rows=num_rows, k=k, n=n, format=format)
    out_bar = testing.random_values(np.random.default_rng(1), (num_rows, n))
    out_bar[end:] = np.nan
    return jnp.asarray(out_bar, dtype), rhs, sizes, end


def check_sums(out, rows, rhs, sizes, end, message="", *, transpose_rhs):
    """Sums in float32, rounded once to the result's dtype; the tail is zeros."""
    a, b = np.asarray(rows, np.float64), exact(rhs)
    expected = numpy_moe.grouped_matmul(a, b, sizes, transpose_rhs=transpose_rhs)
    magnitudes = numpy_moe.grouped_matmul(np.abs(a), np.abs(b), sizes, transpose_rhs=transpose_rhs)
    unit = 2**-8 if out.dtype == jnp.bfloat16 else 2**-24
    bound = 1.01 * unit * np.abs(expected) + 2**-22 * (4 + a.shape[1] ** 0.5) * magnitudes
    error = np.abs(np.asarray(out, np.float64) - expected)[:end]
    np.testing.assert_array_less(error, bound[:end] + 1e-30, message)
    testing.assert_bitwise(out[end:], np.zeros_like(out[end:]), message)


# What no kernel takes: options of the problem, the GPUs' compute capabilities, and the reason.
ANOTHER_GPU = "another_gpu", {}, ["8.0"], "four-bit weights need GPUs of compute capability 9.0"
FALLBACKS = (
    ANOTHER_GPU,
    ("another_format", dict(format=quant.MxFp8()), [], "no kernel multiplies float rows by"),
    ("rows", dict(dtype=jnp.float16), [], "rows are float16; the MXFP4 kernel takes bfloat16"),
    ("k", dict(k=200), [], "K is 200; the MXFP4 kernel takes positive multiples of 32"),
    ("n", dict(n=140), [], "N is 140; the MXFP4 kernel takes positive multiples of 8"),
)


def capabilities(gpus):
    """GPUs with these compute capabilities, in place of this machine's."""
    return unittest.mock.patch.object(
        jax_ep._src.core.runtime, "compute_capabilities", lambda: set(gpus)
    )


class MxFp4MatmulTest(parameterized.TestCase):
    @parameterized.parameters(
        (jnp.bfloat16, jnp.bfloat16), (jnp.bfloat16, jnp.float32), (jnp.float32, jnp.float32)
    )
    def test_every_kind_of_group_sizes(self, row_dtype, dtype):
        for kind, sizes in GROUP_SIZES.items():
            lhs, rhs, sizes, end = problem(sizes, dtype=row_dtype)
            out = matmul(out_dtype=jnp.dtype(dtype))(lhs, rhs, sizes)
            self.assertEqual(out.dtype, dtype)
            check_sums(out, lhs, rhs, sizes, end, kind, transpose_rhs=True)

    @parameterized.product(row_dtype=[jnp.bfloat16, jnp.float32], wide=[False, True])
    @tier.only_on_cpu  # the kernel adds in an order of its own
    def test_bits_are_those_of_dequantized_weights(self, row_dtype, wide):
        dtype = jnp.dtype(jnp.float32 if wide else row_dtype)
        lhs, rhs, sizes, _ = problem([5, 0, 7, 3], dtype=row_dtype)
        weights = quant.dequantize(rhs, row_dtype)
        expected = jax_ep.grouped_matmul(
            lhs, weights, sizes, transpose_rhs=True, preferred_element_type=dtype
        )
        testing.assert_bitwise(matmul(out_dtype=dtype)(lhs, rhs, sizes), expected)

    @tier.only_on_cpu
    def test_on_cuda_it_is_one_kernel(self):
        lhs, rhs, sizes, _ = problem([5, 0, 7, 3])
        program = lower_for_cuda(lhs, rhs, sizes, num_sms=8, zero_tail=False)
        call = program.call("grouped_matmul_mxfp4")
        self.assertEqual(call.operands[0], "32x224xbf16")
        self.assertEqual(call.operands[1], "4x136x224xf4E2M1FN")
        self.assertEqual(call.operands[2], "4x136x7xf8E8M0FNU")
        self.assertEqual(call.attributes["num_sms"], ("i64", 8))
        self.assertEqual(call.attributes["zero_tail"], ("bool", False))
        self.assertEqual(program.targets, {"grouped_matmul_mxfp4": 1})

    @parameterized.named_parameters(*FALLBACKS)
    @tier.only_on_cpu
    def test_on_cuda_what_no_kernel_takes_is_dequantized(self, shape, gpus, reason):
        lhs, rhs, sizes, _ = problem([5, 0, 7, 3], **shape)
        with capabilities(gpus), programs.fallback_warnings() as messages:
            program = lower_for_cuda(lhs, rhs, sizes)
        self.assertLen(messages, 1)
        self.assertIn("dequantizes its weights", messages[0])
        self.assertIn(reason, messages[0])
        self.assertEqual(program.targets, {"grouped_matmul": 1})
        with (
            capabilities(gpus),
            self.assertRaisesRegex(jax_ep.UnavailableError, "was asked for, but"),
        ):
            lower_for_cuda(lhs, rhs, sizes, implementation="cuda")


class LhsGradientTest(parameterized.TestCase):
    @parameterized.parameters(
        (jnp.bfloat16, jnp.bfloat16), (jnp.bfloat16, jnp.float32), (jnp.float32, jnp.float32)
    )
    def test_every_kind_of_group_sizes(self, row_dtype, dtype):
        for kind, sizes in GROUP_SIZES.items():
            out_bar, rhs, sizes, end = gradient_problem(sizes, dtype=row_dtype)
            lhs_bar = lhs_gradient(out_dtype=jnp.dtype(dtype))(out_bar, rhs, sizes)
            self.assertEqual(lhs_bar.dtype, dtype)
            check_sums(lhs_bar, out_bar, rhs, sizes, end, kind, transpose_rhs=False)

    def test_tiles(self):
        """More than one tile, none of them whole, with many and with few rows per group."""
        for sizes in [130, 128, 1, 0, 27, 256], [70, 5, 0, 64, 1, 17]:
            out_bar, rhs, sizes, end = gradient_problem(sizes, num_rows=600, k=544, n=528)
            lhs_bar = lhs_gradient()(out_bar, rhs, sizes)
            check_sums(lhs_bar, out_bar, rhs, sizes, end, transpose_rhs=False)

    @parameterized.parameters(jnp.bfloat16, jnp.float32)
    def test_it_is_the_derivative(self, dtype):
        """Also of float32 results, whose cotangents are rounded to the rows' dtype first."""
        lhs, rhs, sizes, _ = problem([5, 0, 7, 3])
        out_bar, *_ = gradient_problem([5, 0, 7, 3], dtype=dtype)
        _, pull = jax.vjp(lambda lhs: matmul(out_dtype=jnp.dtype(dtype))(lhs, rhs, sizes), lhs)
        expected = lhs_gradient()(out_bar.astype(jnp.bfloat16), rhs, sizes)
        testing.assert_bitwise(pull(out_bar)[0], expected)

    @parameterized.product(row_dtype=[jnp.bfloat16, jnp.float32])
    @tier.only_on_cpu  # the kernel adds in an order of its own
    def test_bits_are_those_of_dequantized_weights(self, row_dtype):
        lhs, rhs, sizes, _ = problem([5, 0, 7, 3], dtype=row_dtype)
        out_bar, *_ = gradient_problem([5, 0, 7, 3], dtype=row_dtype)
        weights = quant.dequantize(rhs, row_dtype)
        multiply = functools.partial(jax_ep.grouped_matmul, transpose_rhs=True)
        _, pull = jax.vjp(lambda lhs: multiply(lhs, weights, sizes), lhs)
        lhs_bar = lhs_gradient(out_dtype=jnp.dtype(row_dtype))(out_bar, rhs, sizes)
        testing.assert_bitwise(lhs_bar, pull(out_bar)[0])

    @tier.only_on_cpu
    def test_on_cuda_it_is_one_kernel(self):
        lhs, rhs, sizes, _ = problem([5, 0, 7, 3])
        loss = lambda lhs: matmul(num_sms=8, zero_tail=False)(lhs, rhs, sizes).sum()
        program = programs.lower_for_cuda(jax.grad(loss), lhs)
        call = program.call("grouped_matmul_mxfp4_lhs_gradient")
        expected = "32x136xbf16", "4x136x224xf4E2M1FN", "4x136x7xf8E8M0FNU", "4xi32"
        self.assertEqual(call.operands, expected)
        self.assertEqual(call.results, ("32x224xbf16",))
        self.assertEqual(call.attributes["num_sms"], ("i64", 8))
        self.assertEqual(call.attributes["zero_tail"], ("bool", False))
        self.assertEqual(program.targets, {"grouped_matmul_mxfp4_lhs_gradient": 1})

    @parameterized.named_parameters(*FALLBACKS)
    @tier.only_on_cpu
    def test_on_cuda_what_no_kernel_takes_is_dequantized(self, shape, gpus, reason):
        out_bar, rhs, sizes, _ = gradient_problem([5, 0, 7, 3], **shape)
        with capabilities(gpus), programs.fallback_warnings() as messages:
            program = programs.lower_for_cuda(lhs_gradient(), out_bar, rhs, sizes)
        self.assertLen(messages, 1)
        self.assertIn("grouped_matmul_mxfp4_lhs_gradient dequantizes its weights", messages[0])
        self.assertIn(reason, messages[0])
        self.assertEqual(program.targets, {"grouped_matmul": 1})
        with (
            capabilities(gpus),
            self.assertRaisesRegex(jax_ep.UnavailableError, "was asked for, but"),
        ):
            programs.lower_for_cuda(lhs_gradient(implementation="cuda"), out_bar, rhs, sizes)


def activation_params(activation, **options):
    return GroupedMatmulActivationParams(
        activation, **dict(num_sms=0, implementation=None) | options
    )


@functools.cache
def activated(activation, *, keep=True):
    call = functools.partial(
        bind_weights_only_activation,
        params=activation_params(activation),
        keep_pre_activation=keep and activation != "none",
    )
    return jax.jit(call)


def activation_problem(sizes, *, given=(1, 1), num_rows=32, k=224, n=272, dtype=jnp.bfloat16):
    """The operands, biases and row weights included, and where the tail begins."""
    lhs, rhs, sizes, end = problem(sizes, num_rows=num_rows, k=k, n=n, dtype=dtype)
    rng = np.random.default_rng(1)
    bias = rng.standard_normal((len(sizes), n), np.float32) if given[0] else None
    weights = rng.random(num_rows, np.float32) if given[1] else None
    if weights is not None:
        weights[end:] = np.nan
    return (lhs, rhs, sizes, bias, weights), end


def check_activation(activation, arguments, end, message=""):
    """Pre-activations by the bound of their sums; activations by what was kept, which they read."""
    lhs, rhs, sizes, bias, weights = arguments
    out, kept = activated(activation)(*arguments)
    a, b = np.asarray(lhs, np.float64), exact(rhs).swapaxes(1, 2)
    expected, pre = grouped.matmul_activation(activation, a, b, sizes, bias, weights)
    of_bias = None if bias is None else np.abs(bias)
    _, magnitudes = grouped.matmul_activation("none", np.abs(a), np.abs(b), sizes, of_bias)
    rounded = 1.01 * 2**-8
    bound = rounded * np.abs(pre) + 2**-22 * (4 + 224**0.5) * magnitudes
    scale = 1 if weights is None else weights[:, None]
    if activation != "none":
        error = np.abs(np.asarray(kept, np.float64) - pre)
        np.testing.assert_array_less(error[:end], bound[:end] + 1e-30, message)
        kept = np.asarray(kept, np.float64)
        expected = scale * grouped.activate(activation, kept)
        gate, up = np.split(np.abs(kept), 2, axis=1) if activation in grouped.GATED else [kept] * 2
        bound = rounded * np.abs(expected) + 2**-20 * scale * np.abs(gate * (up + 1))
    else:
        bound = scale * bound
    error = np.abs(np.asarray(out, np.float64) - expected)
    np.testing.assert_array_less(error[:end], bound[:end] + 1e-30, message)


class ActivationTest(parameterized.TestCase):
    @parameterized.product(activation=["none", "swiglu", "geglu", CLAMPED, "relu2"])
    def test_every_kind_of_group_sizes(self, activation):
        for kind, sizes in GROUP_SIZES.items():
            check_activation(activation, *activation_problem(sizes), kind)

    @parameterized.product(activation=["none", CLAMPED], given=[(0, 0), (0, 1), (1, 0)])
    def test_optional_operands(self, activation, given):
        check_activation(activation, *activation_problem([5, 0, 7, 3], given=given))

    @parameterized.product(activation=["none", CLAMPED])
    def test_tiles(self, activation):
        """More than one tile, none of them whole, with many and with few rows per group."""
        for sizes in [130, 128, 1, 0, 27, 256], [70, 5, 0, 64, 1, 17]:
            check_activation(activation, *activation_problem(sizes, num_rows=600, n=528))

    @parameterized.product(activation=["none", "swiglu", CLAMPED])
    @tier.only_on_cpu  # the kernel adds in an order of its own
    def test_bits_are_those_of_dequantized_weights(self, activation):
        (lhs, rhs, sizes, *optional), end = activation_problem([5, 0, 7, 3])
        call = functools.partial(
            jax_ep._src.matmul.grouped_matmul_activation.bind_activation,
            params=activation_params(activation),
        )
        expected, _ = jax.jit(call)(lhs, quant.dequantize(rhs, lhs.dtype).mT, sizes, *optional)
        out, _ = activated(activation, keep=False)(lhs, rhs, sizes, *optional)
        testing.assert_bitwise(out[:end], np.asarray(expected)[:end])

    @tier.only_on_cpu
    def test_on_cuda_it_is_one_kernel(self):
        arguments, _ = activation_problem([5, 0, 7, 3])
        call = functools.partial(
            bind_weights_only_activation,
            params=activation_params(CLAMPED, num_sms=8),
            keep_pre_activation=True,
        )
        program = programs.lower_for_cuda(call, *arguments)
        self.assertEqual(program.targets, {"grouped_matmul_mxfp4_activation": 1})
        call = program.call("grouped_matmul_mxfp4_activation")
        self.assertEqual(call.operands[3:], ("4xi32", "4x272xf32", "32xf32"))
        self.assertEqual(call.results, ("32x136xbf16", "32x272xbf16"))
        attributes = {
            "activation": "swiglu",
            "num_sms": ("i64", 8),
            "has_bias": ("bool", True),
            "has_row_weights": ("bool", True),
            "keep_pre_activation": ("bool", True),
        }
        for name, value in attributes.items():
            self.assertEqual(call.attributes[name], value, name)
        for name, value in ("limit", 1.3), ("alpha", 1.6):
            self.assertAlmostEqual(call.attributes[name][1], value, 6)

    @tier.only_on_cpu
    def test_a_plain_activation_follows_the_kernel(self):
        arguments, _ = activation_problem([5, 0, 7, 3])
        call = functools.partial(bind_weights_only_activation, params=activation_params("relu2"))
        program = programs.lower_for_cuda(call, *arguments)
        self.assertEqual(program.targets, {"grouped_matmul_mxfp4_activation": 1})
        self.assertEqual(program.calls[0].attributes["activation"], "none")

    @parameterized.named_parameters(
        ANOTHER_GPU,
        ("f", dict(n=264), [], "F is 132; the MXFP4 kernel takes positive multiples of 8"),
    )
    @tier.only_on_cpu
    def test_on_cuda_what_no_kernel_takes_is_dequantized(self, shape, gpus, reason):
        arguments, _ = activation_problem([5, 0, 7, 3], **shape)
        call = functools.partial(bind_weights_only_activation, params=activation_params("swiglu"))
        with capabilities(gpus), programs.fallback_warnings() as messages:
            program = programs.lower_for_cuda(call, *arguments)
        self.assertTrue(any(reason in message for message in messages), messages)
        self.assertEqual(program.targets, {"grouped_matmul_activation": 1})


def lower_for_cuda(lhs, rhs, sizes, **options):
    call = functools.partial(weights_only_matmul, params=params(**options))
    return programs.lower_for_cuda(call, lhs, rhs, sizes)


if __name__ == "__main__":
    absltest.main()
