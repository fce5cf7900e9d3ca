"""vmap over a dimension that another mesh axis shards, as over pipeline stages, by each kind of axis."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep.nnx import MoE

SMALL, LARGE = testing.two_axes()
BATCH = 2 * SMALL  # each shard has two elements
TOKENS, TOP_K, HIDDEN, INTERMEDIATE = 4 * LARGE, 2, 8, 16
NUM_EXPERTS = 2 * LARGE
KINDS = (AxisType.Auto, AxisType.Explicit)


def swiglu(gate_and_up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate_and_up[:, 0]) * gate_and_up[:, 1]


def mesh_of(kind: AxisType) -> jax.sharding.Mesh:
    return testing.mesh_of((SMALL, LARGE), ("stage", "expert"), axis_type=kind)


def stages(kind: AxisType) -> dict[str, Any]:
    """The arguments of vmap: types tell of Explicit axes."""
    return {"spmd_axis_name": "stage"} if kind == AxisType.Auto else {}


def place(mesh: jax.sharding.Mesh, array: np.ndarray, *spec: Any) -> jax.Array:
    return jax.device_put(array, NamedSharding(mesh, P(*spec)))


@functools.cache
def arguments(maps_weights: bool) -> tuple[np.ndarray, ...]:
    """ids, then x, topk_weights, w_up and w_down."""
    rng = np.random.default_rng(0)
    lead = (BATCH,) if maps_weights else ()
    floats = (
        rng.standard_normal((BATCH, TOKENS, HIDDEN)),
        rng.random((BATCH, TOKENS, TOP_K)),
        rng.standard_normal((*lead, NUM_EXPERTS, HIDDEN, 2, INTERMEDIATE)),
        rng.standard_normal((*lead, NUM_EXPERTS, INTERMEDIATE, HIDDEN)),
    )
    ids = rng.integers(-1, NUM_EXPERTS, (BATCH, TOKENS, TOP_K)).astype(np.int32)
    return ids, *(a.astype(np.float32) for a in floats)


def dense(ids: Any, x: Any, topk_weights: Any, w_up: Any, w_down: Any) -> jax.Array:
    hidden = jnp.einsum("th,tkhpf->tkpf", x, w_up[ids], precision="highest")
    hidden = jax.nn.silu(hidden[:, :, 0]) * hidden[:, :, 1]
    weights = jnp.where(ids < 0, 0, topk_weights)
    return jnp.einsum("tkf,tkfh,tk->th", hidden, w_down[ids], weights, precision="highest")


def parts(ids: Any, x: Any, topk_weights: Any, w_up: Any, w_down: Any) -> jax.Array:
    """The operations by themselves."""
    sent = jax_ep.dispatch(x, ids, topk_weights, num_experts=NUM_EXPERTS, axis_name="expert")
    y = jax_ep.grouped_mlp(sent.rows, w_up, w_down, sent.group_sizes)
    return jax_ep.combine(y, sent.plan, sent.row_weights)


def in_order(f: Callable[..., Any], maps_weights: bool, **options: Any) -> Callable[..., Any]:
    matrices = (0, 0) if maps_weights else (None, None)
    return jax.vmap(f, (0, 0, 0, *matrices), **options)


@functools.cache
def expected(maps_weights: bool) -> Any:
    return value_and_gradients(in_order(dense, maps_weights), *arguments(maps_weights))


def value_and_gradients(f: Callable[..., Any], ids: Any, *floats: Any) -> Any:
    loss = lambda floats: jnp.sin(f(ids, *floats)).sum()
    return jax.jit(jax.value_and_grad(loss))(floats)


class OperationsTest(parameterized.TestCase):
    @parameterized.product(
        [
            {"options": {}, "maps_weights": False},
            {"options": {"remat": None}, "maps_weights": True},
            {"options": {"remat": "experts"}, "maps_weights": False},
            {"options": {"activation": swiglu}, "maps_weights": False},
            {"options": {"activation": swiglu}, "maps_weights": True},
            {"options": {"activation": swiglu, "remat": None}, "maps_weights": False},
            {"options": {"activation": swiglu, "remat": "experts"}, "maps_weights": True},
            {"options": {"num_chunks": 2}, "maps_weights": False},
            {"options": {"num_chunks": 2}, "maps_weights": True},
            {"options": None, "maps_weights": False},
        ],
        kind=KINDS,
    )
    def test_values_and_gradients(
        self, options: dict[str, Any] | None, maps_weights: bool, kind: AxisType
    ):
        self.check(options, maps_weights, kind)

    @parameterized.parameters(*KINDS)
    def test_without_check_vma(self, kind: AxisType):
        self.check({"activation": swiglu}, False, kind, check_vma=False)

    def check(
        self, options: dict[str, Any] | None, maps_weights: bool, kind: AxisType, **kwargs: Any
    ) -> None:
        layer = parts
        if options is not None:
            moe = functools.partial(
                jax_ep.moe_mlp, axis_name="expert", num_experts=NUM_EXPERTS, **options
            )
            layer = lambda ids, x, *rest: moe(x, ids, *rest)[0]
        ids, x, topk_weights, *matrices = arguments(maps_weights)
        lead = ("stage",) if maps_weights else ()
        with jax.set_mesh(mesh := mesh_of(kind)):
            placed = [place(mesh, a, "stage", "expert") for a in (ids, x, topk_weights)]
            placed += [place(mesh, a, *lead, "expert") for a in matrices]
            on_ranks = jax.shard_map(
                layer, in_specs=P("expert"), out_specs=P("expert"), axis_names=names(kind), **kwargs
            )
            got = value_and_gradients(in_order(on_ranks, maps_weights, **stages(kind)), *placed)
        leaves = jax.tree.leaves
        for a, b in zip(leaves(got), leaves(expected(maps_weights)), strict=True):
            testing.assert_close(a, np.asarray(b), steps=1024)


def names(kind: AxisType) -> set[str]:
    """The axes of a shard_map: vmap takes an Explicit one away."""
    return {"expert"} if kind == AxisType.Explicit else {"stage", "expert"}


class ModulesTest(parameterized.TestCase):
    """Each stage has a layer of its own, and gives what that layer gives alone."""

    @parameterized.product(
        options=[
            {},
            {"activation": lambda gate, up: jax.nn.silu(gate) * up, "shared_intermediate_size": 8},
            {"num_chunks": 2, "use_bias": True, "remat": "experts"},
        ],
        kind=KINDS,
    )
    def test_stages(self, options: dict[str, Any], kind: AxisType):
        def make(rngs: nnx.Rngs) -> MoE:
            return MoE(HIDDEN, INTERMEDIATE, NUM_EXPERTS, TOP_K, **options, rngs=rngs)

        x = arguments(False)[1]
        layers = [make(nnx.Rngs(stage)) for stage in range(BATCH)]
        graph = nnx.graphdef(layers[0])
        stacked = jax.tree.map(
            lambda *arrays: np.stack(arrays), *(nnx.state(layer, nnx.Param) for layer in layers)
        )

        def outputs(state: Any, x: jax.Array) -> Any:
            y, stats = nnx.merge(graph, state)(x)
            return y, stats.aux_loss, stats.expert_load

        def run(apply: Callable[..., Any], state: Any, x: jax.Array) -> Any:
            def loss(state: Any, x: jax.Array) -> Any:
                y, aux_loss, load = apply(state, x)
                return 0.1 * jnp.sin(y).sum() + (aux_loss**2).sum(), (y, aux_loss, load)

            return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(state, x)

        def one_by_one(state: Any, x: jax.Array) -> Any:
            pick = lambda stage: jax.tree.map(lambda a: a[stage], state)
            alone = [outputs(pick(stage), x[stage]) for stage in range(BATCH)]
            return jax.tree.map(lambda *arrays: jnp.stack(arrays), *alone)

        with jax.set_mesh(testing.mesh_of((1,), ("expert",))):
            wanted = jax.tree.map(np.asarray, run(one_by_one, stacked, x))
        with jax.set_mesh(mesh := mesh_of(kind)):
            state = jax.tree.map(lambda a: place(mesh, a, "stage"), stacked)
            apply = jax.vmap(outputs, **stages(kind))
            got = run(apply, state, place(mesh, x, "stage"))
            if kind == AxisType.Explicit:
                self.assertEqual(got[1][0].sharding.spec[0], "stage")
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            if a.dtype == jnp.int32:
                testing.assert_bitwise(a, b)
            else:
                testing.assert_close(a, b, steps=1024)


if __name__ == "__main__":
    absltest.main()
