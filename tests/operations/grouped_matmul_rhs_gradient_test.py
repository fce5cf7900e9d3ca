"""grouped_matmul_rhs_gradient against numpy in float64, with and without an accumulator."""

from __future__ import annotations

import functools

import testing  # isort: skip

import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import numpy_moe
import tier
from absl.testing import absltest, parameterized
from grouped import GROUP_SIZES, end_of
from jax.sharding import PartitionSpec as P

import jax_ep


@functools.cache
def rhs_gradient(*, donate=False, **options):
    """(lhs, out_gradient, group_sizes, accumulator) -> the sum."""

    def f(lhs, out_gradient, group_sizes, accumulator):
        return jax_ep.grouped_matmul_rhs_gradient(
            lhs, out_gradient, group_sizes, accumulator=accumulator, **options
        )

    return jax.jit(f, donate_argnums=(3,) if donate else ())


def problem(group_sizes, *, num_rows=32, k=6, n=5, dtype=np.float32, transpose_rhs=False):
    """lhs, out_gradient, group_sizes, accumulator; what is past the last group is NaN."""
    rng = np.random.default_rng(0)
    group_sizes = np.array(group_sizes, np.int32)
    lhs, out_gradient = rng.standard_normal((num_rows, k)), rng.standard_normal((num_rows, n))
    end = end_of(group_sizes, num_rows)
    lhs[end:] = out_gradient[end:] = np.nan
    shape = (len(group_sizes), n, k) if transpose_rhs else (len(group_sizes), k, n)
    accumulator = (8 * rng.standard_normal(shape)).astype(np.float32)
    return lhs.astype(dtype), out_gradient.astype(dtype), group_sizes, accumulator


def product(lhs, out_gradient, group_sizes, *, transpose_rhs=False):
    """The gradient alone, in float64."""
    rhs = np.zeros((len(group_sizes), lhs.shape[1], out_gradient.shape[1]))
    rhs = rhs.swapaxes(1, 2) if transpose_rhs else rhs
    return numpy_moe.grouped_matmul_gradient(
        lhs, rhs, group_sizes, out_gradient, transpose_rhs=transpose_rhs
    )[1]


def empty_groups(group_sizes, num_rows):
    return [rows.start == rows.stop for rows in numpy_moe.group_slices(group_sizes, num_rows)]


class ValuesTest(parameterized.TestCase):
    @parameterized.product(dtype=testing.ROW_DTYPES, transpose_rhs=[False, True])
    def test_every_kind_of_group_sizes(self, dtype, transpose_rhs):
        options = dict(transpose_rhs=transpose_rhs)
        for kind, sizes in GROUP_SIZES.items():
            lhs, bar, sizes, accumulator = problem(sizes, dtype=dtype, **options)
            expected = product(lhs, bar, sizes, **options)
            got = rhs_gradient(**options)(lhs, bar, sizes, accumulator)
            self.assertEqual(got.dtype, np.float32)
            testing.assert_close(got, accumulator + expected, kind)
            empty = empty_groups(sizes, len(lhs))
            testing.assert_bitwise(np.asarray(got)[empty], accumulator[empty], kind)
            got = rhs_gradient(**options)(lhs, bar, sizes, None)
            self.assertEqual(got.dtype, dtype)
            testing.assert_close(got, expected, kind)

    @parameterized.product(dtype=testing.ROW_DTYPES, transpose_rhs=[False, True])
    def test_tiles(self, transpose_rhs, dtype):
        """Sizes on both sides of the kernels' tiles, with empty groups between."""
        sizes = [130, 0, 1, 256, 0, 65, 128, 0]
        options = dict(transpose_rhs=transpose_rhs)
        for k, n in (136, 264), (264, 136), (33, 7), (72, 520):
            lhs, bar, sizes, accumulator = problem(
                sizes, num_rows=700, k=k, n=n, dtype=dtype, **options
            )
            got = rhs_gradient(**options)(lhs, bar, sizes, accumulator)
            exact = accumulator + product(lhs, bar, sizes, **options)
            magnitudes = np.abs(accumulator) + product(
                *(np.abs(np.nan_to_num(a)) for a in (lhs, bar)), sizes, **options
            )
            testing.assert_sums(got, exact, magnitudes, 257, f"{k} {n}")
            empty = empty_groups(sizes, len(lhs))
            testing.assert_bitwise(np.asarray(got)[empty], accumulator[empty], f"{k} {n}")

    def test_empty_groups_keep_every_bit(self):
        """Also those of NaN, infinity and negative zero: nothing is read there, and nothing written."""
        lhs, bar, sizes, accumulator = problem([0, 3, 0, -2])
        accumulator[0, 0, :3] = np.nan, np.inf, -0.0
        accumulator[3] = -0.0
        got = np.asarray(rhs_gradient()(lhs, bar, sizes, accumulator))
        testing.assert_bitwise(got[[0, 2, 3]], accumulator[[0, 2, 3]])
        testing.assert_close(got[1], accumulator[1] + product(lhs, bar, sizes)[1])

    def test_no_rows(self):
        _, _, sizes, accumulator = problem([0, 0])
        lhs, bar = np.zeros((0, 6), np.float32), np.zeros((0, 5), np.float32)
        testing.assert_bitwise(rhs_gradient()(lhs, bar, sizes, accumulator), accumulator)

    @parameterized.parameters(jnp.bfloat16, jnp.float16)
    def test_small_terms_are_not_lost(self, dtype):
        """1 + 512 * 2^-12 in steps of 2^-12: a 16-bit sum would stay at 1."""
        one_row = jnp.full((1, 8), 2.0**-6, dtype)
        call = rhs_gradient()
        total = jnp.ones((1, 8, 8), jnp.float32)
        for _ in range(512):
            total = call(one_row, one_row, np.ones(1, np.int32), total)
        testing.assert_bitwise(total, np.full((1, 8, 8), 1.125, np.float32))

    @parameterized.parameters(False, True)
    def test_a_float32_cotangent_is_rounded(self, transpose_rhs):
        options = dict(transpose_rhs=transpose_rhs)
        lhs, bar, sizes, accumulator = problem([5, 0, 7, 3], dtype=jnp.bfloat16, **options)
        wide = bar.astype(np.float32) * np.float32(1 + 2.0**-12)
        got = rhs_gradient(**options)(lhs, wide, sizes, accumulator)
        testing.assert_bitwise(got, rhs_gradient(**options)(lhs, bar, sizes, accumulator))

    def test_is_the_derivative_of_grouped_matmul(self):
        lhs, bar, sizes, _ = problem([5, 0, 7, 3], dtype=jnp.bfloat16)
        rhs = np.zeros((4, 6, 5), jnp.bfloat16)
        f = jax.jit(
            lambda rhs: jax.vjp(lambda rhs: jax_ep.grouped_matmul(lhs, rhs, sizes), rhs)[1](bar)
        )
        testing.assert_bitwise(rhs_gradient()(lhs, bar, sizes, None), f(rhs)[0])


class MemoryTest(parameterized.TestCase):
    def test_a_donated_accumulator_is_updated_in_place(self):
        lhs, bar, sizes, accumulator = problem([5, 0, 7, 3])
        given = jnp.array(accumulator)
        where = given.unsafe_buffer_pointer()
        got = rhs_gradient(donate=True)(lhs, bar, sizes, given)
        self.assertEqual(got.unsafe_buffer_pointer(), where)
        self.assertTrue(given.is_deleted())
        testing.assert_close(got, accumulator + product(lhs, bar, sizes))

    def test_another_accumulator_is_copied(self):
        """Not donated, or used afterwards: it keeps its values."""
        lhs, bar, sizes, accumulator = problem([5, 0, 7, 3])
        given = jnp.array(accumulator)
        once = rhs_gradient()(lhs, bar, sizes, given)
        testing.assert_bitwise(given, accumulator)

        @functools.partial(jax.jit, donate_argnums=0)
        def twice(accumulator):
            add = lambda bar: jax_ep.grouped_matmul_rhs_gradient(
                lhs, bar, sizes, accumulator=accumulator
            )
            return add(bar), add(2 * bar), accumulator + 1

        first, second, plus_one = twice(given)
        testing.assert_bitwise(first, once)
        testing.assert_close(second, accumulator + 2 * product(lhs, bar, sizes))
        testing.assert_bitwise(plus_one, accumulator + 1)

    def test_a_scan_carries_it(self):
        """Gradient accumulation over micro-batches."""
        lhs, bar, sizes, accumulator = problem([5, 0, 7, 3], dtype=jnp.bfloat16)

        @functools.partial(jax.jit, donate_argnums=0)
        def f(accumulator, scales):
            def step(accumulator, scale):
                return jax_ep.grouped_matmul_rhs_gradient(
                    lhs, bar * scale, sizes, accumulator=accumulator
                ), None

            return jax.lax.scan(step, accumulator, scales)[0]

        scales = np.array([1, 2, 4], jnp.bfloat16)
        got = f(jnp.array(accumulator), scales)
        testing.assert_close(got, accumulator + 7 * product(lhs, bar, sizes))


class TransformationsTest(parameterized.TestCase):
    @parameterized.parameters(False, True)
    def test_derivatives(self, transpose_rhs):
        """The accumulator's is the identity; those of rows are the products with the cotangent."""
        options = dict(transpose_rhs=transpose_rhs)
        lhs, bar, sizes, accumulator = problem([5, 0, 7, 3], **options)
        call = lambda lhs, bar, a: rhs_gradient(**options)(lhs, bar, sizes, a)
        result_bar = np.random.default_rng(1).standard_normal(accumulator.shape)
        result_bar = result_bar.astype(np.float32)
        got = jax.jit(lambda *a: jax.vjp(call, *a)[1](result_bar))(lhs, bar, accumulator)
        testing.assert_bitwise(got[2], result_bar)
        for result, rows, transpose in (
            (got[0], bar, not transpose_rhs),
            (got[1], lhs, transpose_rhs),
        ):
            expected = numpy_moe.grouped_matmul(
                np.nan_to_num(rows), result_bar, sizes, transpose_rhs=transpose
            )
            testing.assert_close(result, expected)
        end = end_of(sizes, len(lhs))
        self.assertFalse(np.asarray(got[0])[end:].any())
        self.assertFalse(np.asarray(got[1])[end:].any())

    def test_finite_differences(self):
        lhs, bar, sizes, accumulator = problem([5, 0, 7, 3], num_rows=15)
        for a in None, accumulator:
            call = lambda lhs, bar, a=a: rhs_gradient()(lhs, bar, sizes, a)
            jax.test_util.check_grads(
                call, (lhs, bar), order=1, modes=["rev"], atol=2e-2, rtol=2e-2
            )

    def test_eager(self):
        lhs, bar, sizes, accumulator = problem([5, 0, 7, 3])
        got = jax_ep.grouped_matmul_rhs_gradient(lhs, bar, sizes, accumulator=accumulator)
        testing.assert_bitwise(got, rhs_gradient()(lhs, bar, sizes, accumulator))

    @parameterized.parameters((0, 0, 0, 0), (0, 0, None, None), (None, None, None, 1), (1, 0, 0, 2))
    def test_vmap_is_a_loop(self, *axes):
        """An accumulator without the axis is that of every call, not of their sum."""
        lhs, bar, sizes, accumulator = problem([5, 0, 7, 3])
        arguments = [
            a if axis is None else np.stack([a, a[::-1]], axis)
            for a, axis in zip((lhs[:15], bar[:15], sizes, accumulator), axes, strict=True)
        ]
        got = jax.vmap(rhs_gradient(), axes)(*arguments)
        for index in range(2):
            one = [
                a if axis is None else np.take(a, index, axis)
                for a, axis in zip(arguments, axes, strict=True)
            ]
            testing.assert_bitwise(got[index], rhs_gradient()(*one))

    @parameterized.parameters(True, False)
    def test_inside_shard_map(self, check_vma):
        lhs, bar, sizes, accumulator = problem([5, 0, 7, 3])
        ranks = testing.NUM_DEVICES
        inside = testing.sharded(
            lambda *a: jax_ep.grouped_matmul_rhs_gradient(*a[:3], accumulator=a[3]),
            testing.expert_mesh(),
            check_vma=check_vma,
        )
        got = inside(*(np.concatenate([a] * ranks) for a in (lhs, bar, sizes, accumulator)))
        expected = np.asarray(rhs_gradient()(lhs, bar, sizes, accumulator))
        testing.assert_bitwise(got, np.concatenate([expected] * ranks))

    @tier.only_on_cpu  # one kind of mesh is enough
    def test_an_accumulator_that_is_the_same_on_all_ranks(self):
        """Each rank adds to its own copy of it."""
        lhs, bar, sizes, accumulator = problem([5, 0, 7, 3])
        ranks = testing.NUM_DEVICES
        f = jax.shard_map(
            lambda *a: jax_ep.grouped_matmul_rhs_gradient(*a[:3], accumulator=a[3]),
            mesh=testing.expert_mesh(),
            in_specs=(P("expert"), P("expert"), P(), P()),
            out_specs=P("expert"),
        )
        got = jax.jit(f)(*(np.concatenate([a] * ranks) for a in (lhs, bar)), sizes, accumulator)
        expected = np.asarray(rhs_gradient()(lhs, bar, sizes, accumulator))
        testing.assert_bitwise(got, np.concatenate([expected] * ranks))


if __name__ == "__main__":
    absltest.main()
