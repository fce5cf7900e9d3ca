"""blocked_scales: against loops in numpy that place each scale by cuBLAS's formula, and its errors."""

from __future__ import annotations

import functools

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep import quant


def placed(scales, num_blocks=None, groups=None):
    """Bytes by block; `groups` are (first row, size, first block)."""
    rows, columns = scales.shape
    num_blocks = -(-rows // 128) if num_blocks is None else num_blocks
    column_blocks = -(-columns // 4)
    out = np.zeros(num_blocks * column_blocks * 512, np.uint8)
    for first, size, block in [(0, rows, 0)] if groups is None else groups:
        for row, column in np.ndindex(size, columns):
            tile = (block + row // 128) * column_blocks + column // 4
            inside = row % 32 * 16 + row % 128 // 32 * 4 + column % 4
            out[tile * 512 + inside] = scales[first + row, column]
    return out.reshape(num_blocks, column_blocks, 32, 16)


def random_bytes(*shape):
    return np.random.default_rng(sum(shape)).integers(1, 255, shape, np.uint8)


class BlockedScalesTest(parameterized.TestCase):
    @parameterized.parameters((1, 1), (128, 4), (129, 5), (300, 90), (0, 3))
    def test_each_scale_is_in_its_place(self, rows, columns):
        scales = random_bytes(rows, columns)
        np.testing.assert_array_equal(quant.blocked_scales(jnp.array(scales)), placed(scales))

    @parameterized.parameters(quant.MxFp8(), quant.MxFp4(), quant.NvFp4())
    def test_weights_keep_their_dtype_and_groups(self, format):
        """Compiled and mapped alike."""
        w = jnp.asarray(np.random.default_rng(0).standard_normal((3, 200, 96)), jnp.bfloat16)
        scales = quant.quantize(w, format).scales
        blocked = jax.jit(quant.blocked_scales)(scales)
        self.assertEqual(blocked.dtype, scales.dtype)
        for group, (one, by_vmap) in enumerate(
            zip(blocked, jax.vmap(quant.blocked_scales)(scales), strict=True)
        ):
            expected = placed(np.asarray(scales[group]).view(np.uint8))
            np.testing.assert_array_equal(np.asarray(one).view(np.uint8), expected)
            np.testing.assert_array_equal(np.asarray(by_vmap).view(np.uint8), expected)

    @parameterized.parameters(
        ([5, 0, 128, 129, 1],), ([0, 0, 0],), ([400],), ([1] * 9,), ([0, 399],)
    )
    def test_groups_begin_at_blocks_of_their_own(self, sizes):
        """Rows after the last group are of none."""
        scales = random_bytes(400, 7)
        firsts = np.cumsum([0, *sizes])
        blocks = np.cumsum([0, *(-(-size // 128) for size in sizes)])
        groups = list(zip(firsts, sizes, blocks, strict=False))
        expected = placed(scales, 4 + len(sizes), groups)
        got = jax.jit(quant.blocked_scales)(jnp.array(scales), jnp.array(sizes, jnp.int32))
        np.testing.assert_array_equal(got, expected)

    def test_rows_of_dispatch(self):
        """As in the docstring."""
        mesh = testing.mesh_of((2,), ("expert",))
        x = np.random.default_rng(1).standard_normal((60, 64)).astype(np.float32)
        ids = np.random.default_rng(2).integers(0, 6, (60, 2)).astype(np.int32)

        @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))
        def blocked(x, ids):
            options = {"num_experts": 6, "axis_name": "expert"}
            sent = jax_ep.dispatch(quant.quantize(x, quant.MxFp8()), ids, None, **options)
            return (
                quant.blocked_scales(sent.rows.scales, sent.group_sizes),
                sent.rows.scales,
                sent.group_sizes,
            )

        for got, scales, sizes in zip(
            *(np.split(np.asarray(a), 2) for a in blocked(x, ids)), strict=True
        ):
            firsts, blocks = np.cumsum([0, *sizes]), np.cumsum([0, *(-(-sizes // 128))])
            groups = list(zip(firsts, sizes, blocks, strict=False))
            expected = placed(scales.view(np.uint8), len(got), groups)
            np.testing.assert_array_equal(got.view(np.uint8), expected)

    def test_errors(self):
        for scales in (jnp.ones((4, 4)), jnp.ones(4, jnp.uint8)):
            with self.assertRaisesRegex(jax_ep.ArgumentError, "expected float8_e8m0fnu or"):
                quant.blocked_scales(scales)
        scales = jnp.ones((2, 4, 4), jnp.uint8)
        with self.assertRaisesRegex(jax_ep.ArgumentError, r"expected scales \[M, S\] and int32"):
            quant.blocked_scales(scales, jnp.ones(2, jnp.int32))
        with self.assertRaisesRegex(jax_ep.ArgumentError, r"group_sizes float32\[2\]"):
            quant.blocked_scales(scales[0], jnp.ones(2))


if __name__ == "__main__":
    absltest.main()
