"""grouped_matmul and its gradients against numpy in float64, with poison wherever nothing may be read."""

from __future__ import annotations

import functools

import testing  # isort: skip

import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import numpy_moe
from absl.testing import absltest, parameterized
from grouped import GROUP_SIZES
from jax.sharding import PartitionSpec as P

import jax_ep


@functools.cache
def matmul(**options):
    return jax.jit(functools.partial(jax_ep.grouped_matmul, **options))


@functools.cache
def gradients(**options):
    """(lhs, rhs, group_sizes, out_gradient) -> gradients of lhs and rhs."""

    def f(lhs, rhs, group_sizes, out_gradient):
        call = lambda lhs, rhs: jax_ep.grouped_matmul(lhs, rhs, group_sizes, **options)
        return jax.vjp(call, lhs, rhs)[1](out_gradient)

    return jax.jit(f)


def problem(
    group_sizes, *, num_rows=32, k=6, n=5, dtype=np.float32, rhs_dtype=None, transpose_rhs=False
):
    """lhs, rhs, group_sizes and out_gradient; what is past the last group is NaN."""
    rng = np.random.default_rng(0)
    group_sizes = np.array(group_sizes, np.int32)
    lhs, out_gradient = rng.standard_normal((num_rows, k)), rng.standard_normal((num_rows, n))
    rhs = rng.standard_normal(
        (len(group_sizes), n, k) if transpose_rhs else (len(group_sizes), k, n)
    )
    end = list(numpy_moe.group_slices(group_sizes, num_rows))[-1].stop
    lhs[end:] = out_gradient[end:] = np.nan
    rhs = rhs.astype(dtype if rhs_dtype is None else rhs_dtype)
    return lhs.astype(dtype), rhs, group_sizes, out_gradient.astype(dtype), end


class ValuesTest(parameterized.TestCase):
    @parameterized.product(
        dtype=testing.ROW_DTYPES, transpose_rhs=[False, True], zero_tail=[True, False]
    )
    def test_every_kind_of_group_sizes(self, dtype, transpose_rhs, zero_tail):
        options = dict(transpose_rhs=transpose_rhs, zero_tail=zero_tail)
        for kind, sizes in GROUP_SIZES.items():
            lhs, rhs, sizes, out_gradient, end = problem(
                sizes, dtype=dtype, transpose_rhs=transpose_rhs
            )
            out = matmul(**options)(lhs, rhs, sizes)
            expected = numpy_moe.grouped_matmul(lhs, rhs, sizes, transpose_rhs=transpose_rhs)
            self.assertEqual(out.dtype, dtype)
            testing.assert_close(out[:end], expected[:end], kind)
            got = gradients(**options)(lhs, rhs, sizes, out_gradient)
            expected = numpy_moe.grouped_matmul_gradient(
                lhs, rhs, sizes, out_gradient, transpose_rhs=transpose_rhs
            )
            self.assertEqual((got[0].dtype, got[1].dtype), (dtype, dtype))
            testing.assert_close(got[0][:end], expected[0][:end], kind)
            testing.assert_close(got[1], expected[1], kind)
            if zero_tail:
                testing.assert_bitwise(out[end:], np.zeros_like(out[end:]), kind)
                testing.assert_bitwise(got[0][end:], np.zeros_like(got[0][end:]), kind)
            elif jax.default_backend() == "cpu":  # the reference marks what nobody may read
                self.assertTrue(np.isnan(out[end:]).all())
                self.assertTrue(np.isnan(got[0][end:]).all())

    def test_empty_groups_have_zero_gradients(self):
        lhs, rhs, sizes, out_gradient, _ = problem([0, 3, 0, -2])
        gradient = np.asarray(gradients()(lhs, rhs, sizes, out_gradient)[1])
        testing.assert_bitwise(gradient[[0, 2, 3]], np.zeros_like(gradient[[0, 2, 3]]))

    @parameterized.parameters(
        ([130, 128, 1, 0, 127, 256], 700, 33, 17),
        ([1] * 9, 9, 1, 1),
        ([3], 3, 7, 2),
        ([0, 1], 1, 2, 3),
    )
    def test_other_shapes(self, sizes, num_rows, k, n):
        lhs, rhs, sizes, out_gradient, _end = problem(sizes, num_rows=num_rows, k=k, n=n)
        testing.assert_close(
            matmul()(lhs, rhs, sizes), numpy_moe.grouped_matmul(lhs, rhs, sizes), steps=64
        )
        got = gradients()(lhs, rhs, sizes, out_gradient)
        expected = numpy_moe.grouped_matmul_gradient(lhs, rhs, sizes, out_gradient)
        testing.assert_close(got[0], expected[0], steps=64)
        testing.assert_close(got[1], expected[1], steps=64)

    @parameterized.product(
        dtype=testing.ROW_DTYPES, transpose_rhs=[False, True], num_rows=[200, 300]
    )
    def test_errors_are_those_of_float32_sums(self, dtype, transpose_rhs, num_rows):
        """Every element within the bound of its own sum, small ones of large terms included."""
        options = dict(transpose_rhs=transpose_rhs)
        lhs, rhs, sizes, bar, _ = problem(
            [64, 0, 100, 36], num_rows=num_rows, k=520, n=96, dtype=dtype, **options
        )
        exact = numpy_moe.grouped_matmul(lhs, rhs, sizes, **options)
        magnitudes = numpy_moe.grouped_matmul(np.abs(lhs), np.abs(rhs), sizes, **options)
        testing.assert_sums(matmul(**options)(lhs, rhs, sizes), exact, magnitudes, 520, "out")
        got = gradients(**options)(lhs, rhs, sizes, bar)
        exact = numpy_moe.grouped_matmul_gradient(lhs, rhs, sizes, bar, **options)
        magnitudes = numpy_moe.grouped_matmul_gradient(
            *map(np.abs, (lhs, rhs)), sizes, np.abs(bar), **options
        )
        testing.assert_sums(got[0], exact[0], magnitudes[0], 96, "lhs gradient")
        testing.assert_sums(got[1], exact[1], magnitudes[1], 100, "rhs gradient")

    @parameterized.parameters(np.int8, np.uint8, np.int16, np.uint32, np.int64, np.uint64)
    def test_sizes_of_any_integer_dtype(self, dtype):
        """As `jax.lax.ragged_dot` takes them."""
        lhs, rhs, sizes, _, _ = problem([5, 0, 7, 3])
        expected = matmul()(lhs, rhs, sizes)
        with jax.enable_x64(True):
            testing.assert_bitwise(jax_ep.grouped_matmul(lhs, rhs, sizes.astype(dtype)), expected)

    @parameterized.parameters(
        (np.int64, 2**32 + 5, 2**31 - 1),
        (np.int64, -(2**32) + 5, -(2**31)),
        (np.uint32, 2**32 - 1, 2**31 - 1),
        (np.uint64, 2**63 + 5, 2**31 - 1),
    )
    def test_sizes_that_do_not_fit_are_clipped(self, dtype, given, same_as):
        """Wrapped, 2**32 + 5 would be 5 rows."""
        lhs, rhs, _, _, _ = problem([5, 0, 7, 3])
        lhs = np.nan_to_num(lhs)
        wide = np.array([given, 1, 1, 1], dtype)
        expected = matmul()(lhs, rhs, np.array([same_as, 1, 1, 1], np.int32))
        testing.assert_bitwise(jax_ep.grouped_matmul(lhs, rhs, wide), expected)
        with jax.enable_x64(True):
            testing.assert_bitwise(jax_ep.grouped_matmul(lhs, rhs, jnp.asarray(wide)), expected)

    def test_agrees_with_ragged_dot(self):
        lhs, rhs, sizes, _, end = problem([5, 0, 7, 3])
        lhs[end:] = 0
        expected = jax.lax.ragged_dot(lhs, rhs, sizes, precision="highest")
        testing.assert_close(matmul()(lhs, rhs, sizes), np.asarray(expected))

    def test_finite_differences(self):
        lhs, rhs, sizes, *_ = problem([5, 0, 7, 3], num_rows=15)
        call = lambda lhs, rhs: matmul()(lhs, rhs, sizes)
        jax.test_util.check_grads(call, (lhs, rhs), order=1, modes=["rev"], atol=2e-2, rtol=2e-2)


class DtypesTest(parameterized.TestCase):
    @parameterized.parameters(jnp.bfloat16, jnp.float16)
    def test_preferred_element_type_is_float32_sums(self, dtype):
        lhs, rhs, sizes, _, _end = problem([5, 0, 7, 3], dtype=dtype, k=64)
        out = matmul(preferred_element_type=jnp.float32)(lhs, rhs, sizes)
        self.assertEqual(out.dtype, np.float32)
        testing.assert_close(out, numpy_moe.grouped_matmul(lhs, rhs, sizes), steps=64)
        same = matmul(preferred_element_type=dtype)(lhs, rhs, sizes)
        testing.assert_bitwise(same, np.asarray(out).astype(dtype))

    @parameterized.product(dtype=[jnp.bfloat16, jnp.float16], transpose_rhs=[False, True])
    def test_master_weights(self, dtype, transpose_rhs):
        """rhs in float32: rounded to lhs's dtype in the product; the gradient is float32, never rounded."""
        options = dict(transpose_rhs=transpose_rhs)
        for kind, sizes in GROUP_SIZES.items():
            lhs, rhs, sizes, out_gradient, end = problem(
                sizes, dtype=dtype, rhs_dtype=np.float32, transpose_rhs=transpose_rhs
            )
            out = matmul(**options)(lhs, rhs, sizes)
            self.assertEqual(out.dtype, dtype)
            expected = numpy_moe.grouped_matmul(lhs, rhs.astype(dtype), sizes, **options)
            testing.assert_close(out[:end], expected[:end], kind)
            got = gradients(**options)(lhs, rhs, sizes, out_gradient)
            expected = numpy_moe.grouped_matmul_gradient(
                lhs, rhs.astype(dtype), sizes, out_gradient, **options
            )
            self.assertEqual((got[0].dtype, got[1].dtype), (dtype, np.float32))
            testing.assert_close(got[0][:end], expected[0][:end], kind)
            testing.assert_close(got[1], expected[1], kind)  # within float32's rounding

    def test_bfloat16_sums_are_float32(self):
        """1 + 2^-9 * 512 is 2 in float32; a bfloat16 accumulator would stay at 1."""
        lhs = jnp.full((1, 513), 2.0**-9, jnp.bfloat16).at[0, 0].set(1)
        out = matmul()(lhs, jnp.ones((1, 513, 1), jnp.bfloat16), jnp.ones(1, jnp.int32))
        self.assertEqual(float(out[0, 0]), 2.0)

    def test_float32_products_are_not_rounded_to_less(self):
        lhs = jnp.full((1, 1), 1 + 2.0**-20)
        out = matmul()(lhs, jnp.full((1, 1, 1), 1 - 2.0**-20), jnp.ones(1, jnp.int32))
        self.assertEqual(float(out[0, 0]), float(np.float32((1 + 2.0**-20) * (1 - 2.0**-20))))


class PlacesTest(parameterized.TestCase):
    """It is no collective: the same inside and outside shard_map, on any mesh, under vmap."""

    def test_eager(self):
        """Without jit, outside shard_map; forward and backward."""
        lhs, rhs, sizes, out_gradient, _ = problem([5, 0, 7, 3])
        out, backward = jax.vjp(lambda lhs, rhs: jax_ep.grouped_matmul(lhs, rhs, sizes), lhs, rhs)
        testing.assert_bitwise(out, matmul()(lhs, rhs, sizes))
        expected = gradients()(lhs, rhs, sizes, out_gradient)
        jax.tree.map(testing.assert_bitwise, backward(jnp.asarray(out_gradient)), expected)

    def test_inside_shard_map(self):
        lhs, rhs, sizes, _out_gradient, _ = problem([5, 0, 7, 3])
        ranks = testing.NUM_DEVICES
        for check_vma in True, False:
            inside = testing.sharded(
                jax_ep.grouped_matmul, testing.expert_mesh(), check_vma=check_vma
            )
            out = inside(*(np.concatenate([a] * ranks) for a in (lhs, rhs, sizes)))
            expected = np.asarray(matmul()(lhs, rhs, sizes))
            testing.assert_bitwise(out, np.concatenate([expected] * ranks))

    def test_matrices_shared_by_all_ranks_get_the_sum_of_their_gradients(self):
        lhs, rhs, sizes, out_gradient, _ = problem([5, 0, 7, 3])
        ranks = testing.NUM_DEVICES

        @functools.partial(jax.grad, argnums=(0, 1))
        def loss_gradient(rhs, lhs, sizes):
            f = jax.shard_map(
                lambda lhs, rhs, sizes: jax_ep.grouped_matmul(lhs, rhs, sizes),
                mesh=testing.expert_mesh(),
                in_specs=(P("expert"), P(), P()),
                out_specs=P("expert"),
            )
            return (f(lhs, rhs, sizes)[:15] * jnp.asarray(out_gradient[:15])).sum() * ranks

        lhs[15:] = out_gradient[15:] = 0
        every = np.concatenate([lhs] * ranks)
        rhs_gradient, lhs_gradient = jax.jit(loss_gradient)(rhs, every, sizes)
        expected = numpy_moe.grouped_matmul_gradient(lhs, rhs, sizes, out_gradient)
        testing.assert_close(rhs_gradient, expected[1] * ranks)
        testing.assert_close(lhs_gradient[:32], expected[0] * ranks)
        self.assertFalse(np.asarray(lhs_gradient[32:]).any())

    @parameterized.parameters(
        (0, 0, 0), (0, None, None), (None, 1, None), (1, 0, None), (None, None, 0)
    )
    def test_vmap_is_a_loop(self, *axes):
        rng = np.random.default_rng(3)
        shapes = [(8, 4), (3, 4, 2), (3,)]
        arguments = [
            rng.standard_normal(shape if axis is None else (*shape[:axis], 2, *shape[axis:]))
            for shape, axis in zip(shapes, axes, strict=True)
        ]
        arguments = [a.astype(np.float32) for a in arguments[:2]]
        sizes = np.array([[3, 1, 2], [0, 5, 3]], np.int32)
        arguments.append(sizes if axes[2] == 0 else sizes[0])
        got = jax.vmap(matmul(), axes)(*arguments)
        for index in range(2):
            one = [
                a if i is None else np.take(a, index, i)
                for a, i in zip(arguments, axes, strict=True)
            ]
            testing.assert_bitwise(got[index], matmul()(*one))


if __name__ == "__main__":
    absltest.main()
