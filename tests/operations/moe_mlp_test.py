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
HIDDEN, EXPERT_HIDDEN = 8, 6
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
    up = (2, EXPERT_HIDDEN) if gated else (EXPERT_HIDDEN,)
    draw = lambda *shape: rng.standard_normal(shape)
    weight_dtype = weight_dtype or dtype
    return Parameters(
        x=draw(num_tokens, HIDDEN).astype(dtype),
        topk_weights=rng.random((num_tokens, sizes.top_k)).astype(np.float32) if weights else None,
        w_up=(draw(num_experts, HIDDEN, *up) / 2).astype(weight_dtype),
        w_down=(draw(num_experts, EXPERT_HIDDEN, HIDDEN) / 2).astype(weight_dtype),
        b_up=draw(num_experts, *up).astype(weight_dtype) if biases else None,
        b_down=draw(num_experts, HIDDEN).astype(weight_dtype) if biases else None,
    )


@functools.cache
def layer(mesh=SIZES.mesh, **options):
    """(ids, *floats) -> (out, plan)."""

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
            out, plan = layer(activation=activation)(testing.merge_ranks(ids), *p.floats)
            plans = SIZES.plans(ids)
            kept = np.stack(
                [plan.kept for plan in plans]
            )  # repeats may go beyond the default capacity
            expected = numpy_layer(ids, p, ACTIVATIONS[activation], kept=kept)
            testing.assert_close(testing.split_ranks(out, MOST), expected, kind, steps=64)
            testing.assert_plan(plan, plans, kind)

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
        """Capacity is split over the chunks; what a chunk's plan dropped is missing from the sum."""
        p = parameters()
        f = layer(recv_capacity=8, num_chunks=num_chunks)
        for kind in "uniform", "skewed", "to_one_rank":
            ids = testing.routings(SIZES)[kind]
            out, plans = f(testing.merge_ranks(ids), *p.floats)
            plans = [plans] if num_chunks == 1 else plans
            self.assertLen(plans, num_chunks)
            kept = np.concatenate(
                [testing.split_ranks(plan.kept, MOST) for plan in plans], axis=1
            )  # [R, T, K]
            expected = numpy_layer(ids, p, ACTIVATIONS["swiglu"], kept=kept)
            testing.assert_close(testing.split_ranks(out, MOST), expected, kind, steps=64)
            for chunk, plan in enumerate(plans):
                tokens = SIZES.num_tokens // num_chunks
                sizes = dataclasses.replace(SIZES, num_tokens=tokens, recv_capacity=8 // num_chunks)
                of_chunk = ids[:, chunk * tokens : (chunk + 1) * tokens]
                testing.assert_plan(plan, sizes.plans(of_chunk), kind)

    def test_is_made_of_the_three_operations(self):
        p = parameters(biases=False)
        ids = testing.routings(SIZES)["uniform"]

        def by_hand(ids, x, topk_weights, w_up, w_down):
            rows, row_weights, group_sizes, plan = SIZES.dispatch(x, ids, topk_weights)
            h = jax_ep.grouped_matmul(rows, w_up.reshape(2, HIDDEN, -1), group_sizes)
            h = h.reshape(-1, 2, EXPERT_HIDDEN)
            hidden = jax.nn.silu(h[:, 0]) * h[:, 1]
            y = jax_ep.grouped_matmul(hidden, w_down, group_sizes)
            return jax_ep.combine(y, plan, row_weights)

        arguments = (testing.merge_ranks(ids), *p.floats[:4])
        expected = testing.sharded(by_hand, SIZES.mesh)(*arguments)
        out, _ = layer()(testing.merge_ranks(ids), *p.floats)
        testing.assert_close(out, np.asarray(expected))


class GradientsTest(parameterized.TestCase):
    @parameterized.parameters(
        {},
        {"remat": None, "num_chunks": 2},
        {"recv_capacity": 8, "biases": False, "weights": False},
    )
    def test_agree_with_the_dense_layer(self, biases=True, weights=True, **options):
        p = parameters(biases=biases, weights=weights)
        f = layer(**options)
        seed = np.random.default_rng(1).standard_normal(p.x.shape).astype(np.float32)

        @jax.jit
        def gradient(floats, ids):
            loss = lambda floats: (lambda out, plan: (jnp.sum(out * seed), plan))(*f(ids, *floats))
            return jax.grad(loss, has_aux=True)(floats)

        dense = jax.jit(
            jax.grad(lambda floats, ids, kept: (jax_layer(ids, kept, *floats) * seed).sum())
        )
        for kind in "uniform", "half", "to_one_expert", "none", "bad_ids", "repeats":
            ids = testing.routings(SIZES)[kind]
            got, plans = gradient(p.floats, testing.merge_ranks(ids))
            plans = [plans] if "num_chunks" not in options else plans
            kept = np.concatenate([testing.split_ranks(plan.kept, MOST) for plan in plans], axis=1)
            expected = dense(p.floats, testing.merge_ranks(ids), testing.merge_ranks(kept))
            for name, a, b in zip(vars(p), got, expected, strict=True):
                if b is not None:
                    testing.assert_close(a, b, f"{kind} {name}", steps=256)

    @parameterized.parameters("dispatch", None)
    def test_a_function_is_differentiated_as_well(self, remat):
        """Written out, swiglu has the gradients of the named one."""
        p = parameters()
        ids = testing.merge_ranks(testing.routings(SIZES)["half"])
        swiglu = lambda h: jax.nn.silu(h[:, 0]) * h[:, 1]
        got, expected = (
            jax.jit(
                jax.grad(lambda floats, f: jnp.sin(f(ids, *floats)[0]).sum()), static_argnums=1
            )(p.floats, layer(activation=activation, remat=remat))
            for activation in (swiglu, "swiglu")
        )
        for name, a, b in zip(vars(p), got, expected, strict=True):
            testing.assert_close(a, np.asarray(b), name, steps=256)

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

    def test_remat_changes_no_bit_of_the_result(self):
        p = parameters()
        ids = testing.routings(SIZES)["uniform"]
        out, _ = layer(remat="dispatch")(testing.merge_ranks(ids), *p.floats)
        kept, _ = layer(remat=None)(testing.merge_ranks(ids), *p.floats)
        testing.assert_bitwise(out, kept)

    def test_replicated_inputs_and_shared_experts_get_their_psum(self):
        """Tokens over ("data", "expert"), experts over "expert": gradients of experts are summed over "data"."""
        mesh = testing.mesh_of(testing.two_axes(), ("data", "expert"))
        p = parameters()
        ids = testing.merge_ranks(testing.routings(SIZES)["uniform"])
        tokens, experts = P(("data", "expert")), P("expert")
        f = jax.shard_map(
            lambda ids, x, w, *ps: jax_ep.moe_mlp(
                x, ids, w, *ps[:2], b_up=ps[2], b_down=ps[3], axis_name="expert"
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
