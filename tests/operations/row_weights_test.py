"""Row weights count once: grouped_mlp and combine refuse to apply them both."""

from __future__ import annotations

import gc

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from testing import Sizes

import jax_ep
from jax_ep._src.transfer import weighted

SIZES = Sizes(testing.NUM_DEVICES, num_local=2, num_tokens=4, top_k=2, hidden=8)
MESSAGE = "given row weights, and row_weights are given here again"


def layer(ids, x, topk_weights, w_up, w_down, *, in_mlp=True, in_combine=True, through=None):
    sent = SIZES.dispatch(x, ids, topk_weights)
    y = jax_ep.grouped_mlp(
        sent.rows, w_up, w_down, sent.group_sizes, sent.row_weights if in_mlp else None
    )
    y = y if through is None else through(y, sent)
    return jax_ep.combine(y, sent.plan, sent.row_weights if in_combine else None)


def arguments():
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    ids = testing.merge_ranks(testing.routings(SIZES)["uniform"])
    num_tokens, num_experts = len(ids), SIZES.num_experts
    return (
        ids,
        normal(num_tokens, 8),
        rng.random(ids.shape).astype(np.float32),
        normal(num_experts, 8, 2, 4),
        normal(num_experts, 4, 8),
    )


def mapped(**options):
    f = lambda *a: layer(*a, **options)
    return jax.shard_map(f, mesh=SIZES.mesh, in_specs=jax.P("expert"), out_specs=jax.P("expert"))


class TwiceTest(parameterized.TestCase):
    def test_eager_jit_and_grad(self):
        f, (ids, *floats) = mapped(), arguments()
        gradient = jax.grad(lambda floats: f(ids, *floats).sum())
        for call in f, jax.jit(f), lambda ids, *floats: gradient(floats):
            with self.assertRaisesRegex(ValueError, MESSAGE):
                call(ids, *floats)

    def test_through_mask_tail(self):
        masked = lambda y, sent: jax_ep.mask_tail(y, sent.group_sizes)
        with self.assertRaisesRegex(ValueError, MESSAGE):
            mapped(through=masked)(*arguments())

    def test_once_gives_the_same_in_either(self):
        """No false positives: each of the two alone is right."""
        in_mlp = jax.jit(mapped(in_combine=False))(*arguments())
        in_combine = jax.jit(mapped(in_mlp=False))(*arguments())
        testing.assert_close(in_mlp, np.asarray(in_combine), steps=64)

    def test_other_rows_with_weights_of_their_own(self):
        """An array computed from weighted rows may be weighted: that may be meant."""
        out = jax.jit(mapped(through=lambda y, sent: y + sent.rows))(*arguments())
        self.assertTrue(np.isfinite(out).all())


class MarksTest(absltest.TestCase):
    def test_a_mark_goes_with_its_array(self):
        before = len(weighted._weighted)
        rows = jnp.ones((4, 8)) * 2
        weighted.mark(rows)
        self.assertTrue(weighted.is_marked(rows))
        self.assertFalse(weighted.is_marked(rows + 1))
        self.assertLen(weighted._weighted, before + 1)
        del rows
        gc.collect()
        self.assertLen(weighted._weighted, before)


if __name__ == "__main__":
    absltest.main()
