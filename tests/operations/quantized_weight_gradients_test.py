"""Gradients of weights in eight bits: row blocks by loops in numpy, products in float64, and recipes that ask for them."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
import programs
import tier
from absl.testing import absltest, parameterized
from jax.sharding import PartitionSpec as P
from quantized import assert_products, assert_quantized, exact, norm, numpy_quantize, values_of

import jax_ep
from jax_ep import quant
from jax_ep._src.matmul.grouped_matmul_quantized_rhs_gradient import bind_weight_gradient
from jax_ep._src.matmul.params import GroupedMatmulParams
from jax_ep._src.matmul.row_blocks import most_row_blocks, row_blocks
from jax_ep._src.quant.quantize_transposed import bind_quantize_transposed

BLOCKS = quant.Recipe(quantized_weight_gradients=True)
ROWS = quant.Recipe(quant.Fp8Row(), quant.Fp8Row(jnp.float8_e5m2), quantized_weight_gradients=True)
POWERS = quant.Recipe(quant.Fp8Block128("power_of_two"), quantized_weight_gradients=True)
M, K, N = 600, 144, 136
SIZES = (130, 0, 256, 1, 100)
ODD_SIZES = ((0, 0), (700,), (-5, 90, 0, 600, 20), (1, 2, 3, 4), (128, 128))


def numpy_row_blocks(sizes, num_rows):
    """(group, first row, rows) of each block."""
    blocks, row = [], 0
    for group, size in enumerate(sizes):
        end = min(row + max(size, 0), num_rows)
        while row < end:
            blocks.append((group, row, min(128, end - row)))
            row += blocks[-1][2]
    return blocks


def numpy_transposed(x, blocks, format, per_column):
    """Values [B, C, 128] and scales of each block."""
    found = []
    for _, first, rows in blocks:
        block = np.zeros((128, x.shape[1]), np.float32)
        block[:rows] = np.asarray(x[first : first + rows], np.float32)
        values, scales = numpy_quantize(block.T, format, (1 if per_column else 128, 128))
        found.append((values, scales[:, 0]))
    values, scales = zip(*found, strict=True)
    return np.stack(values), np.stack(scales)


def transposed(x, sizes, format, per_column):
    @jax.jit
    def compute(x, sizes):
        blocks = row_blocks(sizes, x.shape[0])
        arrays = bind_quantize_transposed(
            x,
            blocks.first_rows,
            blocks.num_rows,
            format,
            per_column=per_column,
            implementation=None,
        )
        return quant.Quantized(*arrays, format)

    return compute(x, jnp.asarray(sizes, jnp.int32))


def first(x: quant.Quantized, count):
    return dataclasses.replace(x, values=x.values[:count], scales=x.scales[:count])


class RowBlocksTest(parameterized.TestCase):
    @parameterized.product(sizes=(SIZES, *ODD_SIZES), num_rows=[1, 128, M])
    def test_never_span_two_groups(self, sizes, num_rows):
        found = jax.jit(row_blocks, static_argnums=1)(jnp.asarray(sizes, jnp.int32), num_rows)
        expected = numpy_row_blocks(sizes, num_rows)
        self.assertLen(found.first_rows, most_row_blocks(len(sizes), num_rows))
        self.assertLessEqual(len(expected), len(found.first_rows))
        rows = list(zip(found.first_rows.tolist(), found.num_rows.tolist(), strict=True))
        self.assertEqual(rows[: len(expected)], [block[1:] for block in expected])
        self.assertEqual([n for _, n in rows[len(expected) :]], [0] * (len(rows) - len(expected)))
        counts = [sum(block[0] == group for block in expected) for group in range(len(sizes))]
        self.assertEqual(found.group_sizes.tolist(), [128 * count for count in counts])

    def test_as_many_as_any_sizes_need(self):
        for groups, rows in (1, 1), (5, 3), (3, 300), (64, 1000):
            sizes = [rows - min(groups, rows) + 1] + [1] * (min(groups, rows) - 1)
            worst = len(numpy_row_blocks(sizes + [0] * (groups - len(sizes)), rows))
            self.assertEqual(
                most_row_blocks(groups, rows), max(worst, most_row_blocks(groups, rows))
            )
            self.assertGreaterEqual(most_row_blocks(groups, rows), worst)


class QuantizeTransposedTest(parameterized.TestCase):
    @parameterized.product(
        of=[
            (jnp.bfloat16, "none", 300),
            (jnp.bfloat16, "power_of_two", 37),
            (jnp.float32, "none", K),
            (jnp.float16, "power_of_two", 264),
        ],
        per_column=[False, True],
    )
    def test_bits(self, of, per_column):
        dtype, scale_rounding, columns = of
        x = values_of((columns, M)).T * (2.0**-8 if dtype == jnp.float16 else 1)
        x = np.asarray(jnp.asarray(x, dtype))
        format = quant.Fp8Block128(scale_rounding)
        blocks = numpy_row_blocks(SIZES, M)
        found = first(transposed(x, SIZES, format, per_column), len(blocks))
        assert_quantized(found, numpy_transposed(x, blocks, format, per_column))

    @parameterized.product(
        sizes=ODD_SIZES, per_column=[False, True], format=[quant.Fp8Block128(), quant.Fp8Row()]
    )
    def test_quantized_rows(self, sizes, per_column, format):
        x = quant.quantize(values_of((M, 264)), format)
        blocks = numpy_row_blocks(sizes, M)
        if not blocks:
            return
        to = quant.Fp8Block128()
        found = first(transposed(x, sizes, to, per_column), len(blocks))
        rows = np.asarray(quant.dequantize(x, jnp.float32))
        assert_quantized(found, numpy_transposed(rows, blocks, to, per_column))

    @parameterized.parameters(False, True)
    def test_powers_of_two_are_transposed_exactly(self, per_column):
        format = quant.Fp8Block128("power_of_two")
        x = np.random.default_rng(0).normal(size=(256, 256)).astype(np.float32)
        rows = quant.quantize(x, format)
        found = transposed(rows, (256,), format, per_column)
        again = exact(
            quant.Quantized(found.values, np.repeat(found.scales, 1, 1)[..., None], format)
            if per_column
            else quant.Quantized(
                found.values, np.repeat(found.scales, 128, 1)[:, :256, None], format
            )
        )
        expected = exact(rows).reshape(2, 128, 256).swapaxes(1, 2)
        # Up to values that are subnormal with the larger scale.
        lost = np.abs(again - expected) > 0
        self.assertLess(lost.mean(), 2e-3)
        self.assertLess(norm(again, expected), 1e-4)

    def test_a_number_that_is_none_spoils_its_block(self):
        x = np.ones((M, 256), np.float32)
        x[3, 5] = np.nan
        for per_column in (False, True):
            found = transposed(x, SIZES, quant.Fp8Block128(), per_column)
            spoiled = np.isnan(np.asarray(found.values[0], np.float32))
            expected = np.zeros((256, 128), bool)
            expected[5 if per_column else slice(0, 128)] = True
            np.testing.assert_array_equal(spoiled, expected)


def problem(seed=0, sizes=SIZES):
    """lhs and the cotangent; tails are NaN."""
    rng = np.random.default_rng(seed)
    lhs, out_bar = rng.normal(size=(M, K)), rng.normal(size=(M, N))
    lhs[sum(sizes) :] = out_bar[sum(sizes) :] = np.nan
    return jnp.asarray(lhs, jnp.bfloat16), jnp.asarray(out_bar, jnp.bfloat16)


@functools.partial(jax.jit, static_argnames=("recipe", "dtype", "transpose_rhs"))
def gradient(lhs, out_bar, sizes, accumulator=None, *, recipe, dtype, transpose_rhs=False):
    params = GroupedMatmulParams(transpose_rhs, jnp.dtype(dtype), True, 0, None)
    return bind_weight_gradient(
        lhs, out_bar, sizes, recipe, params, jnp.bfloat16, lhs.shape[0], accumulator
    )


def exact_gradient(lhs, out_bar, sizes, recipe, transpose_rhs=False):
    """The sums of products of quantized row blocks in float64, and of their magnitudes."""
    operands = [(lhs, recipe.rows), (out_bar, recipe.cotangents)]
    operands = operands[::-1] if transpose_rhs else operands
    blocks = numpy_row_blocks(sizes, M)
    floats = []
    for (x, format), per_column in zip(operands, (True, False), strict=True):
        format = quant.Fp8Block128(format.scale_rounding, format.min_amax)
        values, scales = numpy_transposed(np.asarray(x), blocks, format, per_column)
        scales = np.repeat(scales, 1 if per_column else 128, 1)[:, : values.shape[1], None]
        floats.append(values.astype(np.float64) * scales)
    a, b = floats
    sums = np.zeros((2, len(sizes), a.shape[1], b.shape[1]))
    for block, (group, *_) in enumerate(blocks):
        sums[0, group] += a[block] @ b[block].T
        sums[1, group] += np.abs(a[block]) @ np.abs(b[block]).T
    return sums


class GradientTest(parameterized.TestCase):
    @parameterized.product(
        recipe=[BLOCKS, ROWS, POWERS],
        dtype=[jnp.bfloat16, jnp.float32],
        transpose_rhs=[False, True],
    )
    def test_products_of_row_blocks(self, recipe, dtype, transpose_rhs):
        lhs, out_bar = problem()
        options = {"recipe": recipe, "dtype": dtype, "transpose_rhs": transpose_rhs}
        found = gradient(lhs, out_bar, np.array(SIZES), **options)
        sums = exact_gradient(lhs, out_bar, SIZES, recipe, transpose_rhs)
        self.assertEqual(found.dtype, dtype)
        assert_products(found, *sums, "gradient", num_terms=M)
        testing.assert_bitwise(found[1], np.zeros_like(found[1]), "a group without rows")

    @parameterized.parameters(*ODD_SIZES)
    def test_groups_of_any_size(self, *sizes):
        lhs, out_bar = problem(sizes=(M,))
        found = gradient(lhs, out_bar, np.array(sizes), recipe=BLOCKS, dtype=jnp.float32)
        sums = exact_gradient(lhs, out_bar, sizes, BLOCKS) if max(sizes) > 0 else np.zeros(2)
        assert_products(found, *sums, "gradient", num_terms=M)

    @parameterized.parameters(False, True)
    def test_accumulates(self, transpose_rhs):
        lhs, out_bar = problem()
        options = {"recipe": BLOCKS, "dtype": jnp.float32, "transpose_rhs": transpose_rhs}
        shape = (len(SIZES), N, K) if transpose_rhs else (len(SIZES), K, N)
        before = np.random.default_rng(1).normal(size=shape).astype(np.float32)
        found = gradient(lhs, out_bar, np.array(SIZES), jnp.asarray(before), **options)
        sums, magnitudes = exact_gradient(lhs, out_bar, SIZES, BLOCKS, transpose_rhs)
        assert_products(
            found, sums + before, magnitudes + np.abs(before), "accumulators", num_terms=M
        )
        testing.assert_bitwise(found[1], before[1], "a group without rows")

    @parameterized.parameters(BLOCKS, ROWS, POWERS)
    def test_powers_of_two_change_no_bit(self, recipe):
        lhs, out_bar = problem()
        options = {"recipe": recipe, "dtype": jnp.float32}
        expected = gradient(lhs, out_bar, np.array(SIZES), **options)
        for scale in 2.0**-40, 2.0**-90:
            found = gradient(lhs, out_bar * scale, np.array(SIZES), **options)
            testing.assert_bitwise(found / np.float32(scale), expected)

    def test_no_rows(self):
        found = gradient(
            jnp.zeros((0, K), jnp.bfloat16),
            jnp.zeros((0, N), jnp.bfloat16),
            np.zeros(3, np.int32),
            recipe=BLOCKS,
            dtype=jnp.float32,
        )
        testing.assert_bitwise(found, np.zeros((3, K, N), np.float32))


@functools.cache
def matmul_gradient(recipe, transpose_rhs=False):
    """lhs, rhs, out_bar -> the gradient of rhs."""

    def compute(lhs, rhs, out_bar):
        call = lambda rhs: jax_ep.grouped_matmul(
            lhs, rhs, jnp.array(SIZES), quantization=recipe, transpose_rhs=transpose_rhs
        )
        return jax.vjp(call, rhs)[1](out_bar)[0]

    return jax.jit(compute)


class RecipeTest(parameterized.TestCase):
    @parameterized.product(recipe=[BLOCKS, ROWS, POWERS], transpose_rhs=[False, True])
    def test_grouped_matmul(self, recipe, transpose_rhs):
        lhs, out_bar = problem()
        rhs = np.random.default_rng(2).normal(size=(len(SIZES), K, N)).astype(np.float32)
        given = rhs.swapaxes(1, 2) if transpose_rhs else rhs
        found = matmul_gradient(recipe, transpose_rhs)(lhs, given, out_bar)
        rows = quant.dequantize(quant.quantize(lhs, recipe.rows), jnp.float32)
        sums = exact_gradient(rows, out_bar, SIZES, recipe, transpose_rhs)
        assert_products(found, *sums, "gradient", num_terms=M)
        clean = (
            np.nan_to_num(np.asarray(lhs, np.float64)),
            np.nan_to_num(np.asarray(out_bar, np.float64)),
        )
        ends = np.cumsum((0, *SIZES))
        true = np.stack([clean[0][i:j].T @ clean[1][i:j] for i, j in itertools.pairwise(ends)])
        error = norm(found.mT if transpose_rhs else found, true)
        # Each rounding errs by 2.6 %: two of rows, or one with powers of two, and one of cotangents.
        self.assertBetween(error, *((0.034, 0.041) if recipe == POWERS else (0.041, 0.048)))

    @parameterized.parameters(BLOCKS, ROWS)
    @tier.only_on_cpu
    def test_on_cuda_it_is_kernels(self, recipe):
        lhs, out_bar = problem()
        rhs = jnp.zeros((len(SIZES), K, N))
        with programs.fallback_warnings() as messages:
            program = programs.lower_for_cuda(matmul_gradient(recipe), lhs, rhs, out_bar)
        self.assertEmpty(messages)
        self.assertEqual(program.targets["quantize_transposed"], 2)
        self.assertEqual(program.targets["grouped_matmul_quantized_rhs_gradient"], 1)
        self.assertEqual(program.targets["grouped_matmul_rhs_gradient"], 0)
        calls = [call for call in program.calls if "quantize_transposed" in call.target]
        operands = [call.operands[0] for call in calls]
        self.assertCountEqual(operands, [f"{M}x{K}xf8E4M3FN", f"{M}x{N}xbf16"])

    def test_vmap(self):
        lhs, out_bar = problem()
        rhs = np.random.default_rng(2).normal(size=(2, len(SIZES), K, N)).astype(np.float32)
        of_one = matmul_gradient(BLOCKS)
        found = jax.vmap(of_one, in_axes=(None, 0, 0))(lhs, rhs, jnp.stack([out_bar, 2 * out_bar]))
        for one, scale in zip(found, (1, 2), strict=True):
            testing.assert_bitwise(one, of_one(lhs, rhs[0], scale * out_bar))


H, F, TOKENS = 144, 128, 256


@functools.cache
def layer_problem():
    """x, ids, weights, w_up, w_down, of all ranks."""
    rng = np.random.default_rng(0)
    experts = 2 * testing.NUM_DEVICES
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    ids = np.argsort(rng.random((TOKENS, experts)), 1)[:, :2].astype(np.int32)
    return (
        normal(TOKENS, H),
        ids,
        rng.random((TOKENS, 2), np.float32),
        normal(experts, H, 2, F) / H**0.5,
        normal(experts, F, H) / F**0.5,
    )


@functools.cache
def layer_gradients(dtype=jnp.bfloat16, calls=0, **options):
    """layer_problem() -> gradients of x, weights, w_up and w_down; of a chain of some calls."""

    def layer(x, ids, weights, up, down):
        call = functools.partial(jax_ep.moe_mlp, axis_name="expert", **options)
        if calls == 0:
            return call(x, ids, weights, up, down)[0]
        sums = jax_ep.accumulators(up.reshape(*up.shape[:2], -1), down, like=x)
        for _ in range(calls):
            x, _, sums = call(x, ids, weights, up, down, accumulators=sums)
        return x

    mapped = jax.shard_map(
        layer, mesh=testing.expert_mesh(), in_specs=P("expert"), out_specs=P("expert")
    )

    def loss(x, ids, weights, up, down):
        y = mapped(x.astype(dtype), ids, weights, up, down)
        return jnp.sum(y.astype(jnp.float32) * jnp.cos(jnp.arange(y.size)).reshape(y.shape))

    return jax.jit(jax.grad(loss, (0, 2, 3, 4)))


class MoeMlpTest(parameterized.TestCase):
    @parameterized.parameters(BLOCKS, ROWS, POWERS)
    def test_only_gradients_of_weights_change(self, recipe):
        plain = dataclasses.replace(recipe, quantized_weight_gradients=False)
        expected = layer_gradients(quantization=plain)(*layer_problem())
        found = layer_gradients(quantization=recipe)(*layer_problem())
        for result, other in zip(found[:2], expected[:2], strict=True):
            if tier.ON_GPU and recipe is not ROWS:
                # A kernel computes the gradient of the activation, and XLA that of `plain`.
                self.assertLess(norm(result, other), 5e-3)
            else:
                testing.assert_bitwise(result, other)
        for result, other in zip(found[2:], expected[2:], strict=True):
            self.assertBetween(norm(result, other), 0.02, 0.055)

    def test_near_float32(self):
        true = layer_gradients(jnp.float32)(*layer_problem())
        found = layer_gradients(quantization=BLOCKS)(*layer_problem())
        for result, other in zip(found[2:], true[2:], strict=True):
            self.assertBetween(norm(result, other), 0.03, 0.085)

    @parameterized.parameters(dict(remat="dispatch"), dict(remat=None), dict(remat="experts"))
    def test_modes_have_the_same_bits(self, remat):
        expected = layer_gradients(quantization=BLOCKS)(*layer_problem())
        found = layer_gradients(quantization=BLOCKS, remat=remat)(*layer_problem())
        jax.tree.map(testing.assert_bitwise, found, expected)

    def test_cotangents_that_are_sent_quantized(self):
        sent = dataclasses.replace(BLOCKS, quantized_dispatch=True, quantized_cotangents=True)
        expected = layer_gradients(quantization=BLOCKS)(*layer_problem())
        found = layer_gradients(quantization=sent)(*layer_problem())
        jax.tree.map(testing.assert_bitwise, found[:3], expected[:3])
        self.assertBetween(norm(found[3], expected[3]), 0.005, 0.05)

    def test_chain_of_calls(self):
        """Accumulators hold what gradients of the calls add up to."""
        one = layer_gradients(quantization=BLOCKS, calls=1)(*layer_problem())
        expected = layer_gradients(quantization=BLOCKS)(*layer_problem())
        for result, other in zip(one, expected, strict=True):
            self.assertLess(norm(result, other), 1e-6)
        two = layer_gradients(quantization=BLOCKS, calls=2)(*layer_problem())
        true = layer_gradients(jnp.float32, calls=2)(*layer_problem())
        for result, other in zip(two, true, strict=True):
            self.assertBetween(norm(result, other), 0.03, 0.15)


if __name__ == "__main__":
    absltest.main()
