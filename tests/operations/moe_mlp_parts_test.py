"""moe_mlp's shared expert, local_only and experts_fn: values and gradients of the dense layer."""

from __future__ import annotations

import functools

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
import tier
from absl.testing import absltest, parameterized
from jax.sharding import PartitionSpec as P

import jax_ep

TOKENS, HIDDEN, INTERMEDIATE, SHARED, EXPERTS, TOP_K = 16, 8, 6, 4, 8, 2
NAMES = ("x", "topk_weights", "w_up", "w_down", "shared_up", "shared_down", "shared_gate")
MESHES = {
    "one": ((1,), ("expert",)),
    "four": ((4,), ("expert",)),
    "eight": ((8,), ("expert",)),
    "three axes": ((2, 2, 2), ("data", "expert", "tensor")),
}


def make_mesh(name):
    shape, names = MESHES[name]
    return testing.mesh_of(testing.fit(shape), names)


def arguments():
    """ids with some that are not routed, and the float arguments."""
    rng = np.random.default_rng(0)
    ids = rng.random((TOKENS, EXPERTS)).argsort(-1)[:, :TOP_K].astype(np.int32)
    ids[rng.random(ids.shape) < 0.2] = -1
    draw = lambda *shape: (rng.standard_normal(shape) / 2).astype(np.float32)
    floats = (
        draw(TOKENS, HIDDEN),
        rng.random((TOKENS, TOP_K)).astype(np.float32),
        draw(EXPERTS, HIDDEN, 2, INTERMEDIATE),
        draw(EXPERTS, INTERMEDIATE, HIDDEN),
        draw(HIDDEN, 2, SHARED),
        draw(SHARED, HIDDEN),
        draw(HIDDEN, 1),
    )
    return ids, floats


def swiglu(h):
    return jax.nn.silu(h[..., 0, :]) * h[..., 1, :]


def dense(ids, floats, *, shared, gated, weights_on_input):
    x, topk_weights, w_up, w_down, shared_up, shared_down, shared_gate = floats
    with jax.default_matmul_precision("highest"):
        hits = ids[..., None] == jnp.arange(EXPERTS)
        weights = jnp.where(hits, topk_weights[..., None], 0).sum(1)  # of distinct experts
        inputs = jnp.einsum("te,th->teh", weights if weights_on_input else hits.any(1), x)
        h = swiglu(jnp.einsum("teh,ehcf->tecf", inputs, w_up))
        outputs = jnp.einsum("tef,efh->teh", h, w_down)
        y = jnp.einsum("te,teh->th", hits.any(1) if weights_on_input else weights, outputs)
        if shared:
            gate = 1 / (1 + jnp.exp(-x @ shared_gate)) if gated else 1
            y += gate * (swiglu(jnp.einsum("th,hcf->tcf", x, shared_up)) @ shared_down)
    return y


def layer(mesh, *, shared=True, gated=False, local_only=False, **options):
    """(ids, floats) -> y on a mesh, of which "tensor" shards F."""
    has = lambda name: name if name in mesh.axis_names else None
    tensor = has("tensor")
    tokens = P(has("data")) if local_only else P((*filter(None, [has("data")]), "expert"))
    experts = P("expert", None, None, tensor), P("expert", tensor)
    floats = tokens, tokens, *experts, P(None, None, tensor), P(tensor), P()
    sums = tuple(filter(None, [tensor, "expert" if local_only else None]))

    def f(ids, x, topk_weights, w_up, w_down, shared_up, shared_down, shared_gate):
        y, _ = jax_ep.moe_mlp(
            x,
            ids,
            topk_weights,
            w_up,
            w_down,
            axis_name="expert",
            num_experts=EXPERTS,
            shared_expert=(shared_up, shared_down) if shared else None,
            shared_gate=shared_gate if gated else None,
            local_only=local_only,
            **options,
        )
        return jax.lax.psum(y, sums) if sums else y

    mapped = jax.shard_map(f, mesh=mesh, in_specs=(tokens, *floats), out_specs=tokens)
    return lambda ids, floats: mapped(ids, *floats)


def by_ragged_dot(rows, group_sizes, w_up, w_down):
    """A user's experts: plain JAX on the rows."""
    up = w_up.reshape(*w_up.shape[:2], -1)
    h = jax.lax.ragged_dot(rows, up, group_sizes, precision="highest")
    h = swiglu(h.reshape(len(rows), 2, -1))
    return jax.lax.ragged_dot(h, w_down, group_sizes, precision="highest")


def value_and_gradients(f, ids, floats):
    def loss(floats):
        y = f(ids, floats)
        return jnp.sin(y).sum(), y

    return jax.value_and_grad(loss, has_aux=True)(floats)


class ReferenceTest(parameterized.TestCase):
    def check(self, mesh, *, shared=True, gated=False, weights_on_input=False, **options):
        ids, floats = arguments()
        parts = {"shared": shared, "gated": gated, "weights_on_input": weights_on_input}
        run = jax.jit(
            functools.partial(value_and_gradients, layer(make_mesh(mesh), **parts, **options))
        )
        (_, y), gradients = run(ids, floats)
        expected = value_and_gradients(functools.partial(dense, **parts), ids, floats)
        testing.assert_close(y, expected[0][1], "y", steps=128)
        for name, got, want in zip(NAMES, gradients, expected[1], strict=True):
            testing.assert_close(got, want, name, steps=256)
        return run, ids, floats, gradients

    @parameterized.parameters(*MESHES)
    def test_shared_expert(self, mesh):
        self.check(mesh)

    @parameterized.parameters(
        ("one", {}), ("three axes", {}), ("eight", {"local_only": True}),
        ("four", {"num_chunks": 2, "remat": "experts"}),
    )  # fmt: skip
    def test_a_gate_on_the_shared_expert(self, mesh, options):
        self.check(mesh, gated=True, **options)

    @parameterized.product(
        options=[
            {"remat": None}, {"remat": "dispatch", "num_chunks": 2}, {"remat": "experts"},
        ],
        experts=["name", "function", "experts_fn"],
    )  # fmt: skip
    def test_weights_on_the_input(self, options, experts):
        """Llama-4's, with each derivative rule; the gradient of the weights is of the inputs."""
        options = (
            options
            | {
                "name": {},
                "function": {"activation": lambda gate, up: jax.nn.silu(gate) * up},
                "experts_fn": {"experts_fn": by_ragged_dot},
            }[experts]
        )
        self.check("four", weights_on_input=True, shared=False, **options)

    @parameterized.parameters(("three axes", {}), ("eight", {"local_only": True}))
    def test_weights_on_the_input_on_meshes(self, mesh, options):
        self.check(mesh, weights_on_input=True, gated=True, **options)

    @parameterized.parameters(
        ("eight", {}), ("three axes", {}), ("four", {"num_chunks": 2, "remat": "experts"})
    )
    def test_local_only(self, mesh, options):
        """The sum over the ranks has the shared expert once."""
        self.check(mesh, local_only=True, **options)

    @parameterized.parameters(
        ("four", {"num_chunks": 2}),
        ("three axes", {"remat": "experts"}),
        ("eight", {"local_only": True}),
    )
    def test_experts_of_ones_own(self, mesh, options):
        self.check(mesh, experts_fn=by_ragged_dot, **options)

    @parameterized.parameters({"remat": "experts"}, {"activation": swiglu}, {"num_chunks": 2})
    def test_options_of_the_layer_with_a_shared_expert(self, **options):
        self.check("four", **options)

    def test_finite_differences(self):
        """Central differences along random directions, with the routing fixed."""
        run, ids, floats, gradients = self.check("four")
        rng = np.random.default_rng(1)
        step = 3e-2

        def value_at(index, shift):
            moved = list(floats)
            moved[index] = floats[index] + shift
            return float(run(ids, tuple(moved))[0][0])

        for index, name in enumerate(NAMES):
            direction = rng.standard_normal(floats[index].shape).astype(np.float32)
            direction *= step / np.linalg.norm(direction)
            difference = (value_at(index, direction) - value_at(index, -direction)) / 2
            slope = float((gradients[index] * direction).sum())
            bound = 1e-3 * step * float(np.linalg.norm(gradients[index]))
            self.assertAlmostEqual(difference, slope, delta=bound, msg=name)


class LocalOnlyTest(absltest.TestCase):
    def stats(self, ids, **options):
        _, (x, weights, w_up, w_down, *_) = arguments()
        f = jax.shard_map(
            lambda ids, x, weights, w_up, w_down: jax_ep.moe_mlp(
                x, ids, weights, w_up, w_down, axis_name="expert", local_only=True, **options
            )[1],
            mesh=testing.expert_mesh(),
            in_specs=(P(), P(), P(), P("expert"), P("expert")),
            out_specs=P("expert"),
        )
        return jax.jit(f)(ids, x, weights, w_up, w_down)

    def test_counts(self):
        ids, _ = arguments()
        ids[0] = [EXPERTS, -7]
        stats = self.stats(ids)
        load = (ids[..., None] == np.arange(EXPERTS)).sum((0, 1))
        np.testing.assert_array_equal(stats.expert_rows, load)
        np.testing.assert_array_equal(stats.num_bad_ids, 2)  # every rank sees all tokens
        self.assertFalse(np.asarray(stats.num_dropped).any())

    def test_capacity(self):
        stats = self.stats(np.zeros((TOKENS, TOP_K), np.int32), recv_capacity=5)
        dropped = np.zeros(testing.NUM_DEVICES, np.int32)
        dropped[0] = TOKENS * TOP_K - 5
        np.testing.assert_array_equal(stats.num_dropped, dropped)

    def test_a_wrong_result_of_experts_fn(self):
        ids, _ = arguments()
        for result in (
            lambda rows: rows[:1],
            lambda rows: (rows, rows),
            lambda rows: rows.astype(jnp.int32),
        ):
            experts_fn = lambda rows, *_, result=result: result(rows)
            with self.assertRaisesRegex(jax_ep.Error, "moe_mlp: experts_fn's result"):
                self.stats(ids, experts_fn=experts_fn, num_experts=EXPERTS)

    def test_experts_fn_beside_a_shared_expert(self):
        """Its columns are those of the shared expert: one is not added to all of these."""
        ids, (x, *_) = arguments()
        hidden = x.shape[1]
        shared = jnp.ones((hidden, 2, 4)), jnp.ones((4, hidden))
        for columns in 1, hidden - 1:
            experts_fn = lambda rows, *_, columns=columns: rows[:, :columns]
            with self.assertRaisesRegex(jax_ep.ArgumentError, "beside a shared expert has shape"):
                self.stats(ids, experts_fn=experts_fn, num_experts=EXPERTS, shared_expert=shared)

    @tier.only_on_cpu
    def test_a_factor_is_of_the_even_share(self):
        """T * K / R assignments per rank: here 4096 of 32768, and 5120 rows."""
        shape = lambda *s, dtype=jnp.float32: jax.ShapeDtypeStruct(s, dtype)
        f = jax.shard_map(
            lambda ids, x, w_up, w_down: jax_ep.moe_mlp(
                x, ids, None, w_up, w_down, axis_name="expert", local_only=True,
                capacity_factor=1.25, activation="relu",
            )[0],
            mesh=testing.expert_mesh(8),
            in_specs=(P(), P(), P("expert"), P("expert")),
            out_specs=P("expert"),
        )  # fmt: skip
        program = jax.make_jaxpr(f)(
            shape(8192, 4, dtype=jnp.int32), shape(8192, 8), shape(32, 8, 16), shape(32, 16, 8)
        )
        self.assertIn("f32[5120,16]", str(program))


if __name__ == "__main__":
    absltest.main()
