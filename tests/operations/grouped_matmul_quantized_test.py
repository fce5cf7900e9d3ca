"""grouped_matmul of quantized operands against numpy in float64 over the dequantized operands."""

from __future__ import annotations

import functools
import unittest.mock

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
import numpy_moe
import programs
import tier
from absl.testing import absltest, parameterized
from grouped import GROUP_SIZES
from quantized import assert_products, exact

import jax_ep
from jax_ep import quant

BLOCK, POWER = quant.Fp8Block128(), quant.Fp8Block128("power_of_two")
ROW, E5M2 = quant.Fp8Row(), quant.Fp8Row(jnp.float8_e5m2)
IN_KERNELS = ((BLOCK, BLOCK), (POWER, POWER), (ROW, ROW), (E5M2, ROW))
FORMATS = IN_KERNELS if tier.ON_GPU else (*IN_KERNELS, (BLOCK, ROW), (ROW, BLOCK))


@functools.cache
def matmul(**options):
    return jax.jit(functools.partial(jax_ep.grouped_matmul, **options))


def problem(sizes, formats=(BLOCK, BLOCK), *, num_rows=32, k=208, n=136, transpose_rhs=False):
    """Quantized lhs and rhs, sizes, and where the tail begins; the tail of lhs is NaN."""
    rng = np.random.default_rng(0)
    sizes = np.array(sizes, np.int32)
    lhs = testing.random_values(rng, (num_rows, k))
    rhs = testing.random_values(rng, (len(sizes), *((n, k) if transpose_rhs else (k, n))))
    end = list(numpy_moe.group_slices(sizes, num_rows))[-1].stop
    lhs[end:] = np.nan
    return (
        quant.quantize(lhs, formats[0]),
        quant.quantize_weights(rhs, formats[1], transpose_rhs=transpose_rhs),
        sizes,
        end,
    )


class QuantizedMatmulTest(parameterized.TestCase):
    @parameterized.product(
        formats=FORMATS, transpose_rhs=[False, True], dtype=[None, jnp.bfloat16, jnp.float32]
    )
    def test_every_kind_of_group_sizes(self, formats, transpose_rhs, dtype):
        options = dict(transpose_rhs=transpose_rhs)
        for kind, sizes in GROUP_SIZES.items():
            lhs, rhs, sizes, end = problem(sizes, formats, **options)
            out = matmul(preferred_element_type=dtype, **options)(lhs, rhs, sizes)
            self.assertEqual(out.dtype, dtype or jnp.bfloat16)
            a, b = exact(lhs), exact(rhs)
            expected = numpy_moe.grouped_matmul(a, b, sizes, **options)
            magnitudes = numpy_moe.grouped_matmul(np.abs(a), np.abs(b), sizes, **options)
            assert_products(out[:end], expected[:end], magnitudes[:end], kind, 210)
            testing.assert_bitwise(out[end:], np.zeros_like(out[end:]), kind)

    def test_scales_are_those_of_the_block(self):
        """One block of one operand has another scale: its terms alone change."""
        lhs, rhs, sizes, _ = problem([32], k=256, n=256)
        ones = jnp.ones_like
        lhs = quant.Quantized(ones(lhs.values), ones(lhs.scales).at[3, 1].set(2), BLOCK)
        rhs = quant.Quantized(ones(rhs.values), ones(rhs.scales).at[0, 0, 1].set(4), BLOCK)
        out = np.asarray(matmul(preferred_element_type=jnp.float32)(lhs, rhs, sizes))
        expected = np.full((32, 256), 256.0, np.float32)
        expected[:, 128:] = 128 * 4 + 128
        expected[3] += 128
        testing.assert_bitwise(out, expected)

    def test_zero_tail_is_optional(self):
        lhs, rhs, sizes, end = problem([5, 0, 7, 3])
        out = matmul(zero_tail=False)(lhs, rhs, sizes)
        testing.assert_bitwise(out[:end], matmul()(lhs, rhs, sizes)[:end])

    def test_both_directions_of_a_matrix(self):
        """The blocks of mT are those of the transpose, for the input gradient."""
        lhs, rhs, sizes, _ = problem([5, 0, 7, 3])
        got = matmul(transpose_rhs=True)(lhs, rhs.mT, sizes)
        testing.assert_bitwise(got, matmul()(lhs, rhs, sizes))

    def test_inside_shard_map_and_vmap(self):
        lhs, rhs, sizes, _ = problem([5, 0, 7, 3])
        expected = np.asarray(matmul()(lhs, rhs, sizes))
        ranks = testing.NUM_DEVICES
        repeat = lambda a: np.concatenate([np.asarray(a)] * ranks)
        for check_vma in True, False:
            inside = testing.sharded(
                jax_ep.grouped_matmul, testing.expert_mesh(), check_vma=check_vma
            )
            out = inside(*jax.tree.map(repeat, (lhs, rhs, sizes)))
            testing.assert_bitwise(out, np.concatenate([expected] * ranks))
        two = jax.tree.map(lambda a: jnp.stack([a, a]), (lhs, rhs, sizes))
        testing.assert_bitwise(jax.vmap(matmul())(*two), np.stack([expected] * 2))

    def test_derivatives_are_refused(self):
        lhs, rhs, sizes, _ = problem([5, 0, 7, 3])

        def loss(scales):
            scaled = quant.Quantized(lhs.values, scales, lhs.format)
            return jax_ep.grouped_matmul(scaled, rhs, sizes).sum()

        with self.assertRaisesRegex(jax_ep.UnavailableError, "no derivative"):
            jax.grad(loss)(lhs.scales)

    @parameterized.product(formats=IN_KERNELS, transpose_rhs=[False, True])
    @tier.only_on_cpu
    def test_on_cuda_it_is_one_kernel(self, formats, transpose_rhs):
        lhs, rhs, sizes, _ = problem([5, 0, 7, 3], formats, transpose_rhs=transpose_rhs)
        program = lower_for_cuda(lhs, rhs, sizes, transpose_rhs=transpose_rhs, num_sms=8)
        call = program.call("grouped_matmul_quantized")
        name = "f8E5M2" if formats[0] == E5M2 else "f8E4M3FN"
        self.assertEqual(call.operands[0], f"32x208x{name}")
        self.assertEqual(call.operands[2], "4x136x208xf8E4M3FN")
        block = ("i64", 128 if formats[0] in (BLOCK, POWER) else 0)
        self.assertEqual(call.attributes["scale_block"], block)
        self.assertEqual(call.attributes["num_sms"], ("i64", 8))
        self.assertEqual(call.attributes["zero_tail"], ("bool", True))
        self.assertEqual(program.targets, {"grouped_matmul_quantized": 1})

    @parameterized.named_parameters(
        ("another_gpu", {}, ["8.0"], "compute capability 9.0, and there is one of 8.0"),
        ("mixed_formats", dict(formats=(ROW, BLOCK)), [], "no kernel multiplies Fp8Row"),
        ("weights_in_e5m2", dict(formats=(E5M2, E5M2)), [], "no kernel multiplies Fp8Row"),
        ("k", dict(k=200), [], "K is 200; the FP8 kernels take positive multiples of 16"),
        ("n", dict(n=140), [], "N is 140; the FP8 kernels take positive multiples of 8"),
    )
    @tier.only_on_cpu
    def test_on_cuda_what_no_kernel_takes_is_dequantized(self, shape, gpus, reason):
        lhs, rhs, sizes, _ = problem([5, 0, 7, 3], **shape)
        other_gpu = unittest.mock.patch.object(
            jax_ep._src.core.runtime, "compute_capabilities", lambda: set(gpus)
        )
        with other_gpu, programs.fallback_warnings() as messages:
            program = lower_for_cuda(lhs, rhs, sizes)
        self.assertLen(messages, 1)
        self.assertIn("dequantizes its operands to bfloat16", messages[0])
        self.assertIn(reason, messages[0])
        self.assertEqual(program.targets, {"grouped_matmul": 1})
        k = lhs.shape[1]
        self.assertEqual(program.call("grouped_matmul").operands[0], f"32x{k}xbf16")
        with other_gpu, self.assertRaisesRegex(jax_ep.UnavailableError, "was asked for, but"):
            lower_for_cuda(lhs, rhs, sizes, implementation="cuda")

    @tier.only_on_cpu
    def test_on_cuda_scales_have_the_blocks_of_the_kernel(self):
        lhs, rhs, sizes, _ = problem([5, 0, 7, 3], (ROW, ROW))
        per_tensor = quant.Quantized(lhs.values, lhs.scales[:1], ROW)
        with programs.fallback_warnings() as messages:
            lower_for_cuda(per_tensor, rhs, sizes)
        self.assertIn("scales have shapes (1, 1) and (4, 136, 1)", messages[0])

    @tier.only_on_cpu
    def test_on_cuda_pure_jax_on_request(self):
        lhs, rhs, sizes, _ = problem([5, 0, 7, 3])
        with programs.fallback_warnings() as messages:
            program = lower_for_cuda(lhs, rhs, sizes, implementation="xla")
        self.assertEmpty(messages)
        self.assertEmpty(program.targets)


def lower_for_cuda(lhs, rhs, sizes, **options):
    call = functools.partial(jax_ep.grouped_matmul, **options)
    return programs.lower_for_cuda(call, lhs, rhs, sizes)


if __name__ == "__main__":
    absltest.main()
