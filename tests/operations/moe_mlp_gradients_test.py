"""The gradients of moe_mlp: those of the dense layer by JAX, and their dtypes and sums."""

from __future__ import annotations

import dataclasses
import functools

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax.sharding import PartitionSpec as P
from moe_layers import SIZES, chunk_plans, jax_layer, kept_of, layer, parameters

import jax_ep


class GradientsTest(parameterized.TestCase):
    @parameterized.parameters(
        {},
        {"remat": None, "num_chunks": 2},
        {"num_chunks": 4},
        {"remat": "experts", "num_chunks": 2},
        {"recv_capacity": 8, "biases": False, "weights": False},
    )
    def test_agree_with_the_dense_layer(self, biases=True, weights=True, **options):
        p = parameters(biases=biases, weights=weights)
        f = layer(**options)
        seed = np.random.default_rng(1).standard_normal(p.x.shape).astype(np.float32)

        @jax.jit
        def gradient(floats, ids):
            return jax.grad(lambda floats: jnp.sum(f(ids, *floats)[0] * seed))(floats)

        dense = jax.jit(
            jax.grad(lambda floats, ids, kept: (jax_layer(ids, kept, *floats) * seed).sum())
        )
        for kind in "uniform", "half", "to_one_expert", "none", "bad_ids", "repeats":
            ids = testing.routings(SIZES)[kind]
            got = gradient(p.floats, testing.merge_ranks(ids))
            chunks = chunk_plans(
                ids, options.get("num_chunks", 1), recv_capacity=options.get("recv_capacity")
            )
            kept = np.concatenate([kept_of(plans) for plans in chunks], axis=1)
            expected = dense(p.floats, testing.merge_ranks(ids), testing.merge_ranks(kept))
            for name, a, b in zip(vars(p), got, expected, strict=True):
                if b is not None:
                    testing.assert_close(a, b, f"{kind} {name}", steps=256)

    @parameterized.parameters(
        ("dispatch", 1), (None, 4), ("experts", 4), ("dispatch", 4), (None, 1)
    )
    def test_a_function_is_differentiated_as_well(self, remat, num_chunks):
        """Written out, swiglu has the gradients of the named one, which in turn are those of the dense layer."""
        swiglu = lambda h: jax.nn.silu(h[:, 0]) * h[:, 1]
        got = self.gradients_of(activation=swiglu, remat=remat, num_chunks=num_chunks)
        expected = self.gradients_of(activation="swiglu")
        for name, a, b in zip(vars(parameters()), got, expected, strict=True):
            testing.assert_close(a, np.asarray(b), name, steps=256)

    @staticmethod
    @functools.cache
    def gradients_of(**options):
        p = parameters()
        ids = testing.merge_ranks(testing.routings(SIZES)["half"])
        f = layer(**options)
        return jax.jit(jax.grad(lambda floats: jnp.sin(f(ids, *floats)[0]).sum()))(p.floats)

    def test_dtypes(self):
        """Master weights: bfloat16 tokens, float32 experts; every gradient has its primal's dtype."""
        p = parameters(dtype=jnp.bfloat16, weight_dtype=jnp.float32)
        p.topk_weights = p.topk_weights.astype(jnp.float16)
        ids = testing.routings(SIZES)["uniform"]
        f = layer()

        @jax.jit
        def gradient(floats):
            return jax.grad(
                lambda floats: jnp.sum(f(testing.merge_ranks(ids), *floats)[0].astype(jnp.float32))
            )(floats)

        for name, a, b in zip(vars(p), gradient(p.floats), p.floats, strict=True):
            self.assertEqual(a.dtype, b.dtype, name)
            self.assertTrue(np.isfinite(np.asarray(a, np.float32)).all(), name)
            self.assertTrue(np.asarray(a).any(), name)

    @parameterized.parameters(("dispatch", "function"), (None, "swiglu"))
    def test_gradients_of_chunks_are_summed_in_float32(self, remat, activation):
        """Those of 16-bit weights are rounded once, so they are the rounded ones of float32 weights."""
        swiglu = lambda h: jax.nn.silu(h[:, 0]) * h[:, 1]
        activation = swiglu if activation == "function" else activation
        ids = testing.merge_ranks(testing.routings(SIZES)["uniform"])

        @functools.partial(jax.jit, static_argnums=1)
        def gradient(floats, f):
            return jax.grad(lambda floats: jnp.sin(f(ids, *floats)[0].astype(jnp.float32)).sum())(
                floats
            )

        f = layer(num_chunks=4, remat=remat, activation=activation)
        p = parameters(dtype=jnp.bfloat16, biases=False)
        wide = dataclasses.replace(
            p, w_up=p.w_up.astype(np.float32), w_down=p.w_down.astype(np.float32)
        )
        got, expected = gradient(p.floats, f), gradient(wide.floats, f)
        for name, a, b in zip(vars(p), got, expected, strict=True):
            if name.startswith("w_"):
                self.assertEqual((a.dtype, b.dtype), (jnp.bfloat16, jnp.float32))
                self.assertTrue(np.asarray(a).any(), name)
                testing.assert_bitwise(a, np.asarray(b).astype(jnp.bfloat16), name)

    @parameterized.parameters("dispatch", None)
    def test_chunks_in_a_scan(self, remat):
        """Layers in a loop."""
        p = parameters(biases=False)
        ids = testing.merge_ranks(testing.routings(SIZES)["half"])

        def layers(num_chunks, floats):
            def per_rank(ids, x, topk_weights, w_up, w_down):
                def step(x, _):
                    out, _ = jax_ep.moe_mlp(
                        x,
                        ids,
                        topk_weights,
                        w_up,
                        w_down,
                        axis_name="expert",
                        num_chunks=num_chunks,
                        remat=remat,
                    )
                    return x + out, None

                return jax.lax.scan(step, x, length=3)[0]

            out = testing.sharded(per_rank, SIZES.mesh)(ids, *floats)
            return jnp.sin(out).sum()

        floats = p.floats[:4]
        got, expected = (jax.jit(jax.grad(functools.partial(layers, n)))(floats) for n in (2, 1))
        for name, a, b in zip(vars(p), got, expected, strict=False):
            testing.assert_close(a, np.asarray(b), name, steps=256)

    @parameterized.product(remat=["dispatch", None], activation=["swiglu", "function"])
    def test_no_stand_in_is_kept(self, remat, activation):
        """Residuals have the matrices in their own dtype, and no float32 array of their shape."""
        activation = (
            (lambda h: jnp.tanh(h[:, 0]) * h[:, 1]) if activation == "function" else activation
        )
        p = parameters(dtype=jnp.bfloat16, biases=False)
        ids = testing.merge_ranks(testing.routings(SIZES)["half"])
        f = layer(num_chunks=2, remat=remat, activation=activation)
        _, backward = jax.vjp(lambda floats: f(ids, *floats)[0], p.floats)
        matrices = [a for a in jax.tree.leaves(backward) if a.ndim > 2]
        self.assertNotEmpty(matrices)
        self.assertEqual({a.dtype for a in matrices}, {jnp.dtype(jnp.bfloat16)})

    def test_remat_changes_no_bit(self):
        p, ids = (
            parameters(dtype=jnp.bfloat16),
            testing.merge_ranks(testing.routings(SIZES)["half"]),
        )

        def loss(floats, remat):
            out, _ = layer(remat=remat)(ids, *floats)
            return jnp.sin(out).sum(), out

        run = jax.jit(jax.grad(loss, has_aux=True), static_argnums=1)
        kept = run(p.floats, None)
        for remat in "dispatch", "experts":
            jax.tree.map(testing.assert_bitwise, run(p.floats, remat), kept)

    @parameterized.parameters(1, 2)
    def test_replicated_inputs_and_shared_experts_get_their_psum(self, num_chunks):
        """Tokens over ("data", "expert"), experts over "expert": gradients of experts are summed over "data"."""
        mesh = testing.mesh_of(testing.two_axes(), ("data", "expert"))
        p = parameters()
        ids = testing.merge_ranks(testing.routings(SIZES)["uniform"])
        tokens, experts = P(("data", "expert")), P("expert")
        f = jax.shard_map(
            lambda ids, x, w, *ps: jax_ep.moe_mlp(
                x,
                ids,
                w,
                *ps[:2],
                b_up=ps[2],
                b_down=ps[3],
                axis_name="expert",
                num_chunks=num_chunks,
            )[0],
            mesh=mesh,
            in_specs=(tokens, tokens, tokens, experts, experts, experts, experts),
            out_specs=tokens,
        )
        loss = lambda f: jax.jit(jax.grad(lambda floats: jnp.sum(jnp.sin(f(*floats)))))
        got = loss(functools.partial(f, ids))(p.floats)
        expected = loss(functools.partial(jax_layer, ids, ids >= 0))(p.floats)
        for name, a, b in zip(vars(p), got, expected, strict=True):
            testing.assert_close(a, b, name, steps=256)


if __name__ == "__main__":
    absltest.main()
