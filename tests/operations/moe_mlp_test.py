"""moe_mlp against the dense layer: loops in numpy for the values, plain JAX for the gradients."""

from __future__ import annotations

import dataclasses
import functools

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
import numpy_moe
from absl.testing import absltest, parameterized
from jax.sharding import PartitionSpec as P
from testing import Sizes

import jax_ep

MOST = testing.NUM_DEVICES
HIDDEN, INTERMEDIATE = 8, 6
SIZES = Sizes(MOST, num_local=2, num_tokens=4, top_k=3, hidden=HIDDEN)

ACTIVATIONS = {
    "swiglu": lambda h: numpy_moe.silu(h[0]) * h[1],
    "geglu": lambda h: numpy_moe.gelu(h[0]) * h[1],
    "gelu": numpy_moe.gelu,
    "relu": lambda h: np.maximum(h, 0),
    "relu2": lambda h: np.maximum(h, 0) ** 2,
    "silu": numpy_moe.silu,
}
GATED = ("swiglu", "geglu")


@dataclasses.dataclass
class Parameters:
    """The float arguments of moe_mlp, all ranks together; a pytree by `floats`."""

    x: np.ndarray
    topk_weights: np.ndarray | None
    w_up: np.ndarray
    w_down: np.ndarray
    b_up: np.ndarray | None
    b_down: np.ndarray | None

    @property
    def floats(self):
        return dataclasses.astuple(self)


def parameters(
    sizes=SIZES, *, gated=True, biases=True, weights=True, dtype=np.float32, weight_dtype=None
):
    rng = np.random.default_rng(0)
    num_experts, num_tokens = sizes.num_experts, sizes.num_ranks * sizes.num_tokens
    up = (2, INTERMEDIATE) if gated else (INTERMEDIATE,)
    draw = lambda *shape: rng.standard_normal(shape)
    weight_dtype = weight_dtype or dtype
    return Parameters(
        x=draw(num_tokens, HIDDEN).astype(dtype),
        topk_weights=rng.random((num_tokens, sizes.top_k)).astype(np.float32) if weights else None,
        w_up=(draw(num_experts, HIDDEN, *up) / 2).astype(weight_dtype),
        w_down=(draw(num_experts, INTERMEDIATE, HIDDEN) / 2).astype(weight_dtype),
        b_up=draw(num_experts, *up).astype(weight_dtype) if biases else None,
        b_down=draw(num_experts, HIDDEN).astype(weight_dtype) if biases else None,
    )


@functools.cache
def layer(mesh=SIZES.mesh, **options):
    """(ids, *floats) -> (out, stats)."""

    def f(ids, x, topk_weights, w_up, w_down, b_up, b_down):
        return jax_ep.moe_mlp(
            x,
            ids,
            topk_weights,
            w_up,
            w_down,
            b_up=b_up,
            b_down=b_down,
            axis_name="expert",
            **options,
        )

    return testing.sharded(f, mesh)


def numpy_layer(ids, p: Parameters, activation, *, kept=None):
    w_up, w_down = p.w_up.astype(np.float64), p.w_down.astype(np.float64)

    def expert(e, token):
        hidden = np.tensordot(token, w_up[e], 1) + (
            0 if p.b_up is None else p.b_up[e].astype(np.float64)
        )
        out = activation(hidden) @ w_down[e]
        return out + (0 if p.b_down is None else p.b_down[e].astype(np.float64))

    num_ranks = ids.shape[0]
    return numpy_moe.dense_moe(
        p.x.reshape(num_ranks, -1, HIDDEN),
        ids,
        None if p.topk_weights is None else p.topk_weights.reshape(ids.shape),
        expert,
        num_experts=len(w_up),
        kept=kept,
    )


def chunk_plans(ids, num_chunks, *, recv_capacity=None):
    """Every chunk's plans by numpy."""
    tokens = SIZES.num_tokens // num_chunks
    sizes = dataclasses.replace(SIZES, num_tokens=tokens, recv_capacity=recv_capacity)
    return [sizes.plans(ids[:, i : i + tokens]) for i in range(0, SIZES.num_tokens, tokens)]


def kept_of(plans):
    return np.stack([plan.kept for plan in plans])


def assert_stats(stats, chunks, message=""):
    """The counts of all chunks' plans, summed."""
    arrays = [numpy_moe.stack(plans) for plans in chunks]
    for field in dataclasses.fields(stats):
        name = "real_group_sizes" if field.name == "expert_load" else field.name
        expected = np.sum([plan[name] for plan in arrays], 0, dtype=np.int32)
        testing.assert_bitwise(getattr(stats, field.name), expected, f"{message} {field.name}")


def jax_layer(ids, kept, x, topk_weights, w_up, w_down, b_up, b_down):
    """swiglu, every token through all its kept experts, in float32: for automatic gradients."""
    out = 0.0
    for k in range(ids.shape[1]):
        e = jnp.clip(ids[:, k], 0, len(w_up) - 1)
        h = jnp.einsum("th,thcf->tcf", x, w_up[e], precision="highest")
        h = h if b_up is None else h + b_up[e]
        y = jnp.einsum("tf,tfh->th", jax.nn.silu(h[:, 0]) * h[:, 1], w_down[e], precision="highest")
        y = y if b_down is None else y + b_down[e]
        out += (
            jnp.where(
                kept[:, k : k + 1], 1 if topk_weights is None else topk_weights[:, k : k + 1], 0
            )
            * y
        )
    return out


class ValuesTest(parameterized.TestCase):
    @parameterized.parameters(*ACTIVATIONS)
    def test_activations_with_biases(self, activation):
        p = parameters(gated=activation in GATED)
        for kind, ids in testing.routings(SIZES).items():
            out, stats = layer(activation=activation)(testing.merge_ranks(ids), *p.floats)
            plans = SIZES.plans(ids)  # repeats may go beyond the default capacity
            expected = numpy_layer(ids, p, ACTIVATIONS[activation], kept=kept_of(plans))
            testing.assert_close(testing.split_ranks(out, MOST), expected, kind, steps=64)
            assert_stats(stats, [plans], kind)

    @parameterized.parameters(
        {"biases": False}, {"weights": False}, {"biases": False, "weights": False}
    )
    def test_optional_arguments(self, **given):
        p = parameters(**given)
        ids = testing.routings(SIZES)["half"]
        out, _ = layer()(testing.merge_ranks(ids), *p.floats)
        expected = numpy_layer(ids, p, ACTIVATIONS["swiglu"])
        testing.assert_close(testing.split_ranks(out, MOST), expected, steps=64)

    def test_activation_of_ones_own(self):
        p = parameters()
        ids = testing.routings(SIZES)["uniform"]
        mine = lambda h: jnp.tanh(h[:, 0]) + h[:, 1]
        out, _ = layer(activation=mine)(testing.merge_ranks(ids), *p.floats)
        expected = numpy_layer(ids, p, lambda h: np.tanh(h[0]) + h[1])
        testing.assert_close(testing.split_ranks(out, MOST), expected, steps=64)

    @parameterized.product(dtype=[jnp.bfloat16, jnp.float16], weight_dtype=[None, jnp.float32])
    def test_half_precision_and_master_weights(self, dtype, weight_dtype):
        p = parameters(dtype=dtype, weight_dtype=weight_dtype)
        ids = testing.routings(SIZES)["uniform"]
        out, _ = layer()(testing.merge_ranks(ids), *p.floats)
        self.assertEqual(out.dtype, dtype)
        expected = numpy_layer(ids, p, ACTIVATIONS["swiglu"])
        testing.assert_close(testing.split_ranks(out, MOST), expected, steps=8)

    @parameterized.parameters(1, 2)
    def test_capacity_and_chunks(self, num_chunks):
        """Capacity is split over the chunks; dropped assignments are missing from the sum."""
        p = parameters()
        f = layer(recv_capacity=8, num_chunks=num_chunks)
        for kind in "uniform", "skewed", "to_one_rank", "bad_ids":
            ids = testing.routings(SIZES)[kind]
            out, stats = f(testing.merge_ranks(ids), *p.floats)
            chunks = chunk_plans(ids, num_chunks, recv_capacity=8 // num_chunks)
            kept = np.concatenate([kept_of(plans) for plans in chunks], axis=1)  # [R, T, K]
            expected = numpy_layer(ids, p, ACTIVATIONS["swiglu"], kept=kept)
            testing.assert_close(testing.split_ranks(out, MOST), expected, kind, steps=64)
            assert_stats(stats, chunks, kind)

    def test_is_made_of_the_three_operations(self):
        p = parameters(biases=False)
        ids = testing.routings(SIZES)["uniform"]

        def by_hand(ids, x, topk_weights, w_up, w_down):
            sent = SIZES.dispatch(x, ids, topk_weights)
            h = jax_ep.grouped_matmul(sent.rows, w_up.reshape(2, HIDDEN, -1), sent.group_sizes)
            h = h.reshape(-1, 2, INTERMEDIATE)
            activations = jax.nn.silu(h[:, 0]) * h[:, 1]
            y = jax_ep.grouped_matmul(activations, w_down, sent.group_sizes)
            return jax_ep.combine(y, sent.plan, sent.row_weights)

        arguments = (testing.merge_ranks(ids), *p.floats[:4])
        expected = testing.sharded(by_hand, SIZES.mesh)(*arguments)
        out, _ = layer()(testing.merge_ranks(ids), *p.floats)
        testing.assert_close(out, np.asarray(expected))


class WeightFormsTest(parameterized.TestCase):
    """[L, H, 2, F], [L, H, 2F] and a (gate, up) pair hold the same experts."""

    FORMS = {
        "stacked": lambda a: a,
        "flat": lambda a: a.reshape(*a.shape[:-2], -1),
        "pair": lambda a: (a[..., 0, :], a[..., 1, :]),
    }

    def value_and_gradients(self, form, p, ids):
        ids = testing.merge_ranks(ids)

        def loss(floats):
            x, topk_weights, w_up, w_down, b_up, b_down = floats
            given = (x, topk_weights, self.FORMS[form](w_up), w_down, self.FORMS[form](b_up))
            return jnp.sin(layer()(ids, *given, b_down)[0]).sum()

        return jax.jit(jax.value_and_grad(loss))(p.floats)

    @parameterized.parameters("flat", "pair")
    def test_same_bits(self, form):
        p, ids = parameters(), testing.routings(SIZES)["half"]
        expected = self.value_and_gradients("stacked", p, ids)
        got = self.value_and_gradients(form, p, ids)
        jax.tree.map(testing.assert_bitwise, got, expected)

    def test_weights_on_every_rank_are_refused(self):
        """In silence, every token would go to rank 0."""
        p, ids = parameters(biases=False), testing.routings(SIZES)["uniform"]

        def run(num_experts, check_vma):
            f = jax.shard_map(
                lambda ids, x, weights, w_up, w_down: jax_ep.moe_mlp(
                    x, ids, weights, w_up, w_down, axis_name="expert", num_experts=num_experts
                )[0],
                mesh=SIZES.mesh,
                in_specs=(P("expert"),) * 3 + (P(), P()),
                out_specs=P("expert"),
                check_vma=check_vma,
            )
            return jax.jit(f)(testing.merge_ranks(ids), *p.floats[:4])

        if MOST > 1:  # one rank has all experts
            with self.assertRaisesRegex(ValueError, "w_up .* is the same on all .*PartitionSpec"):
                run(None, True)
        for check_vma in True, False:
            with self.assertRaisesRegex(ValueError, f"w_up has {2 * MOST} experts .*PartitionSpec"):
                run((MOST + 1) * SIZES.num_experts, check_vma)

    def test_equal_experts_on_every_rank_may_be_asked_for(self):
        p, ids = parameters(biases=False), testing.routings(SIZES)["uniform"]
        p.w_up, p.w_down = (np.concatenate([w[:2]] * MOST) for w in (p.w_up, p.w_down))
        expected, _ = layer()(testing.merge_ranks(ids), *p.floats)
        f = jax.shard_map(
            lambda ids, x, weights, w_up, w_down: jax_ep.moe_mlp(
                x, ids, weights, w_up, w_down, axis_name="expert", num_experts=SIZES.num_experts
            )[0],
            mesh=SIZES.mesh,
            in_specs=(P("expert"),) * 3 + (P(), P()),
            out_specs=P("expert"),
        )
        got = jax.jit(f)(testing.merge_ranks(ids), p.x, p.topk_weights, p.w_up[:2], p.w_down[:2])
        testing.assert_bitwise(got, np.asarray(expected))


class NoTokensTest(parameterized.TestCase):
    @parameterized.parameters({}, {"capacity_factor": 1.5}, {"remat": None})
    def test_values_and_gradients(self, **options):
        """A rank without tokens, as at the end of a batch: empty results, zero gradients."""
        p = parameters()
        p.x, p.topk_weights = p.x[:0], p.topk_weights[:0]
        ids = np.zeros((0, SIZES.top_k), np.int32)
        out, stats = layer(**options)(ids, *p.floats)
        self.assertEqual(out.shape, (0, HIDDEN))
        self.assertFalse(np.asarray(stats.num_received).any())
        loss = lambda floats: layer(**options)(ids, *floats)[0].sum()
        for name, a in zip(vars(p), jax.jit(jax.grad(loss))(p.floats), strict=True):
            self.assertFalse(np.asarray(a).any(), name)


class StatsTest(absltest.TestCase):
    def test_one_spec_takes_all_of_it_out(self):
        """A pytree whose arrays have one dimension; it is the same for any num_chunks."""
        p, ids = parameters(), testing.routings(SIZES)["skewed"]
        for num_chunks in 1, 2:
            _, stats = layer(num_chunks=num_chunks)(testing.merge_ranks(ids), *p.floats)
            self.assertIsInstance(stats, jax_ep.Stats)
            self.assertEqual(stats.expert_load.shape, (SIZES.num_experts,))
            for name in "num_dropped", "num_received", "num_bad_ids", "status":
                self.assertEqual(getattr(stats, name).shape, (MOST,), name)
            assert_stats(stats, chunk_plans(ids, num_chunks))


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
