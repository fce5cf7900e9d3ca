"""Mistakes with nnx.MoE, linen.MoE and their routers: calls, by the class of their error."""

from __future__ import annotations

import pickle
import unittest.mock

import testing  # isort: skip

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax.sharding import AbstractMesh, AxisType

import jax_ep
import jax_ep.linen
import jax_ep.nnx
from errors.common import MESH, ROW, X
from jax_ep import quant
from jax_ep._src.layer import domains


def layer_over_split_hosts():
    """Ranks 0 and 2 are on one host, 1 and 3 on another."""
    hosts = unittest.mock.patch.object(domains, "host_of", lambda device: device.id % 2)
    with hosts, jax.set_mesh(testing.mesh_of((4,), ("expert",))):
        jax_ep.nnx.MoE(8, 4, 8, 2, rngs=nnx.Rngs(0))(X)


def layer(
    shape=(8, 4, 8),
    num_experts=8,
    top_k=2,
    axes=("data", "expert"),
    mask=None,
    quantized=None,
    ids=None,
    **options,
):
    """Builds and calls nnx.MoE on a mesh of 2 * 4 ranks."""

    def build_and_call():
        moe = jax_ep.nnx.MoE(8, 4, num_experts, top_k, rngs=nnx.Rngs(0), **options)
        arrays = {"token_mask": mask, "topk_ids": ids, "quantized_weights": quantized}
        return moe(jnp.ones(shape), **arrays)[0]

    mesh = AbstractMesh((2, 4), axes, axis_types=(AxisType.Auto,) * 2)
    with jax.sharding.use_abstract_mesh(mesh):
        jax.eval_shape(build_and_call)


def linen_layer(logical_axes, rules=(("embed", "data"),), **options):
    """Makes the parameters of linen.MoE under rules, of which none is for the experts."""
    mesh = AbstractMesh((2, 4), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)
    layer = jax_ep.linen.MoE(8, 4, 8, 2, logical_axes=logical_axes, **options)
    with jax.sharding.use_abstract_mesh(mesh), nn.logical_axis_rules(rules):
        jax.eval_shape(layer.init, jax.random.key(0), jnp.ones((8, 8)))


def stack(**options):
    """Prepares nnx.MoE of one layer for a loop over layers."""
    mesh = AbstractMesh((2, 4), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)
    make = lambda: jax_ep.nnx.MoE(8, 4, 8, 2, rngs=nnx.Rngs(0), **options).stack(jnp.ones((8, 8)))
    with jax.sharding.use_abstract_mesh(mesh):
        jax.eval_shape(lambda: make()[1])


def stack_without_metadata():
    """Layers made by nnx.vmap alone."""
    mesh = AbstractMesh((8,), ("expert",), axis_types=(AxisType.Auto,))
    make = nnx.vmap(lambda key: jax_ep.nnx.MoE(8, 4, 8, 2, rngs=nnx.Rngs(key)))
    with jax.sharding.use_abstract_mesh(mesh):
        keys = jax.random.split(jax.random.key(0), 2)
        jax.eval_shape(lambda: make(keys).stack(jnp.ones((8, 8)))[1])


def unpickle_without_devices():
    state = pickle.dumps(jax_ep.linen.MoE(8, 4, 8, 2, mesh=MESH))
    with unittest.mock.patch.object(jax, "devices", lambda platform: []):
        pickle.loads(state)


def stack_with_a_linen_router():
    jax_ep.linen.MoE(8, 4, 8, 2, router=nn.Dense(2)).stack({"params": {}}, X)


def layer_of_another_mesh():
    """Nine experts on four ranks; where the parameters were made, nothing told of them."""
    moe = jax_ep.nnx.MoE(8, 4, 9, 2, rngs=nnx.Rngs(0))
    mesh = AbstractMesh((4,), ("expert",), axis_types=(AxisType.Auto,))
    with jax.sharding.use_abstract_mesh(mesh):
        jax.eval_shape(lambda x: moe(x)[0], jnp.ones((8, 8)))


def layer_without_mesh():
    moe = jax_ep.nnx.MoE(8, 4, 8, 2, rngs=nnx.Rngs(0))
    with unittest.mock.patch.object(jax, "device_count", lambda: 8):
        jax.eval_shape(lambda x: moe(x)[0], jnp.ones((8, 8)))


class CountingRouter(nnx.Module):
    """Counts its calls, which no state outside of the layer's shard_map would see."""

    def __init__(self):
        self.calls = nnx.Variable(jnp.zeros(()))

    def __call__(self, logits, top_k):
        self.calls[...] = self.calls[...] + 1
        return jax_ep.routing.softmax_topk(logits, top_k)


OTHER_MESH = AbstractMesh((8,), ("expert",), axis_types=(AxisType.Auto,))


PRODUCERS = {
    "ArgumentError": [
        layer_over_split_hosts,
        lambda: layer(num_chunks=0),
        lambda: layer(remat="all"),
        lambda: layer(router="dice"),
        lambda: layer(router=CountingRouter()),
        unpickle_without_devices,
        lambda: layer(top_k=9),
        lambda: layer(top_k=0),
        lambda: layer(activation="mish"),
        lambda: layer(capacity_factor=-1),
        lambda: layer(shape=(8,)),
        lambda: layer(shape=(8, 7)),
        lambda: layer(mask=jnp.ones((8, 3), bool)),
        lambda: layer(axes=("expert", "t"), tensor_axis="t", shared_intermediate_size=6),
        layer_of_another_mesh,
        lambda: layer(tensor_axis="data"),
        lambda: layer(fsdp_axis="fdsp"),
        lambda: layer(batch_axes=("dta", "expert")),
        lambda: layer(sequence_axes="seq"),
        lambda: layer(fsdp_axis="expert"),
        lambda: layer(tensor_axis="expert", local_only=True),
        lambda: layer(axes=("a", "b")),
        lambda: layer(batch_axes=(), expert_axis=None),
        lambda: layer(mesh=OTHER_MESH),
        layer_without_mesh,
        stack,
        lambda: stack(fsdp_axis="data"),
        stack_without_metadata,
        stack_with_a_linen_router,
        lambda: jax_ep.routing.softmax_topk(X, 9),
        lambda: jax_ep.routing.sigmoid_topk(X, 2, num_groups=3),
        lambda: jax_ep.routing.select(X, 2, group_score="sum"),
        lambda: layer(shared_gate=True),
        lambda: linen_layer(("exp",)),
        lambda: linen_layer({"experts": "exp"}),
        lambda: linen_layer({"experts": "exp"}, (("exp", "expert"),), fsdp_axis="data"),
        lambda: layer(router=lambda logits, top_k: None, ids=jnp.zeros((8, 4, 2), jnp.int32)),
    ],
    "DtypeError": [
        lambda: layer(param_dtype=jnp.float8_e4m3fn),
        lambda: layer(dtype=jnp.int32),
        lambda: layer(sequence_axes=None),
        lambda: layer(mesh="expert"),
        lambda: layer(mask=jnp.ones((8, 4))),
        lambda: jax_ep.routing.softmax_topk(X, 2.0),
        lambda: jax_ep.routing.softmax_topk(quant.quantize(X, ROW), 2),
        lambda: layer(router=lambda logits, top_k: jax.lax.top_k(logits, top_k)),
    ],
}
