"""Mistakes with dispatch, redispatch and combine, and with their meshes: calls, by the class of their error."""

from __future__ import annotations

import contextlib
import types

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
import programs
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import jax_ep
from errors.common import IDS, MESH, RANKS, WEIGHTS, X, inside
from jax_ep import quant


def mesh_of_two_hosts(sizes, **options):
    devices = [types.SimpleNamespace(id=i, slice_index=i // 4) for i in range(8)]
    jax_ep.make_mesh(sizes, ("expert",), devices=devices, **options)


def dispatch(**options):
    """A call of dispatch with one thing wrong."""
    options = {"num_experts": RANKS, "axis_name": "expert"} | options
    cast = options.pop("cast", lambda *arrays: arrays)
    inside(lambda *arrays: jax_ep.dispatch(*cast(*arrays), **options).rows)


def quantized_per_tensor(x):
    rows = quant.quantize(x, quant.Fp8Row())
    return quant.Quantized(rows.values, rows.scales[:1], rows.format)


def with_plan(use):
    """Traces use(x, plan) with the plan of a dispatch."""

    def f(x, ids, weights):
        plan = jax_ep.dispatch(x, ids, None, num_experts=RANKS, axis_name="expert").plan
        return use(x, plan)

    inside(f)


def redispatch(change=lambda x: x, **options):
    """A call of redispatch with one thing wrong."""
    with_plan(lambda x, plan: jax_ep.redispatch(change(x), plan, **options).rows)


def start(cast=lambda x: x, use=lambda in_flight: in_flight.results, **options):
    """A call of dispatch_start, or of what uses its result, with one thing wrong."""
    options = {"num_experts": RANKS, "axis_name": "expert"} | options
    inside(lambda x, *others: use(jax_ep.dispatch_start(cast(x), *others, **options)))


def combine(change=lambda y, plan, row_weights: (y, plan, row_weights)):
    """A call of combine with one thing wrong."""
    rows = lambda plan: jnp.ones((plan.row_source.shape[0], 8))
    with_plan(lambda x, plan: jax_ep.combine(*change(rows(plan), plan, None)))


def weighted_twice():
    def f(x, ids, weights):
        sent = jax_ep.dispatch(x, ids, weights, num_experts=RANKS, axis_name="expert")
        w_up, w_down = jnp.ones((1, 8, 2, 4)), jnp.ones((1, 4, 8))
        y = jax_ep.grouped_mlp(sent.rows, w_up, w_down, sent.group_sizes, sent.row_weights)
        return jax_ep.combine(y, sent.plan, sent.row_weights)

    inside(f)


def other_mesh():
    """A plan made on all devices, used on an axis of another size."""

    def f(x, ids, weights):
        return jax_ep.dispatch(x, ids, None, num_experts=RANKS, axis_name="expert").plan

    plan = testing.sharded(f, MESH)(X, IDS, WEIGHTS)
    wider = AbstractMesh((2 * RANKS,), ("expert",), axis_types=(AxisType.Auto,))
    rows = 2 * plan.row_source.shape[0]
    use = lambda plan: jax_ep.combine(jnp.ones((plan.row_source.shape[0], 8)), plan, None)
    plan = jax.tree.map(lambda a: programs.struct((2 * a.shape[0], *a.shape[1:]), a.dtype), plan)
    assert plan.row_source.shape[0] == rows
    jax.eval_shape(
        jax.shard_map(use, mesh=wider, in_specs=P("expert"), out_specs=P("expert")), plan
    )


def explicit_sharding():
    mesh = AbstractMesh((2, 2), ("data", "expert"), axis_types=(AxisType.Explicit,) * 2)
    with jax.sharding.use_abstract_mesh(mesh):
        x = programs.struct((8, 8), np.float32, jax.NamedSharding(mesh, P("expert", "data")))
        ids = programs.struct((8, 2), np.int32, jax.NamedSharding(mesh, P("expert")))
        call = lambda x, ids: jax_ep.dispatch(x, ids, None, num_experts=2, axis_name="expert").rows
        f = jax.shard_map(call, in_specs=P("expert"), out_specs=P("expert"), axis_names={"expert"})
        jax.eval_shape(f, x, ids)


def lower(*platforms, implementation="cuda", **options):
    f = jax.shard_map(
        lambda x, ids: (
            jax_ep.dispatch(
                x, ids, None, num_experts=RANKS, axis_name="expert", implementation=implementation
            ).rows
        ),
        mesh=MESH,
        in_specs=P("expert"),
        out_specs=P("expert"),
    )
    with contextlib.ExitStack() as stack:
        for patch in options.get("patches", ()):
            stack.enter_context(patch())
        jax.jit(lambda x, ids: f(x, ids)).trace(options.get("x", X), IDS).lower(
            lowering_platforms=platforms
        )


def call_outside(**options):
    jax_ep.dispatch(X, IDS, None, num_experts=RANKS, **({"axis_name": "expert"} | options))


def call_where_not_manual():
    with jax.set_mesh(MESH):
        jax.eval_shape(lambda: call_outside())


ids_as = lambda dtype: lambda x, ids, w: (x, ids.astype(dtype), w)


PRODUCERS = {
    "ArgumentError": [
        call_outside,
        call_where_not_manual,
        lambda: dispatch(axis_name="data"),
        lambda: dispatch(axis_name=("expert", "expert")),
        lambda: dispatch(axis_name=()),
        explicit_sharding,
        lambda: mesh_of_two_hosts((8,), expert_axis="ep"),
        lambda: mesh_of_two_hosts((16,)),
        lambda: mesh_of_two_hosts((5,)),
        lambda: dispatch(nvlink_domain_size=RANKS + 1),
        other_mesh,
        lambda: dispatch(cast=lambda x, ids, w: (x[0], ids, w)),
        lambda: dispatch(cast=lambda x, ids, w: (x, ids[:1], w)),
        lambda: dispatch(cast=lambda x, ids, w: (x, ids, w[:, :1])),
        lambda: dispatch(cast=lambda x, ids, w: (x, ids[:, :0], None)),
        lambda: dispatch(num_experts=RANKS + 1 if RANKS > 1 else 0),
        lambda: dispatch(num_experts=0),
        lambda: dispatch(row_align=0),
        lambda: dispatch(cast=lambda x, *others: (quantized_per_tensor(x), *others)),
        lambda: dispatch(recv_capacity=0),
        lambda: dispatch(recv_capacity=2**31),
        lambda: dispatch(axis_name=None),
        lambda: dispatch(recv_capacity=8, capacity_factor=1.0),
        lambda: dispatch(capacity_factor=0.0),
        lambda: dispatch(capacity_factor=-1),
        lambda: dispatch(capacity_factor=float("nan")),
        lambda: dispatch(capacity_factor="large"),
        lambda: dispatch(num_sms=0),
        lambda: dispatch(implementation="triton"),
        lambda: redispatch(change=lambda x: x[:2]),
        lambda: redispatch(topk_weights=jnp.ones((4, 1))),
        lambda: start(lane=4),
        lambda: start(use=jax_ep.combine_done),
        lambda: combine(lambda y, plan, w: (y[:-1], plan, w)),
        lambda: combine(lambda y, plan, w: (y, plan, jnp.ones(3))),
        weighted_twice,
        lambda: dispatch(cast=lambda x, *others: (quant.quantize(x, quant.NvFp4()), *others)),
    ],
    "DtypeError": [
        lambda: start(cast=lambda x: quant.quantize(x, quant.Fp8Row())),
        lambda: start(use=lambda in_flight: jax_ep.dispatch_done(in_flight.results)),
        lambda: dispatch(cast=lambda x, ids, w: (x.astype(jnp.int32), ids, w)),
        lambda: dispatch(cast=lambda x, ids, w: (x, ids, w.astype(jnp.int32))),
        lambda: dispatch(cast=lambda x, ids, w: (x, None, None)),
        lambda: dispatch(cast=ids_as(jnp.uint32)),
        lambda: dispatch(recv_capacity=8.5),
        lambda: dispatch(recv_capacity=jnp.int32(8) * jnp.ones(2)),
        lambda: dispatch(num_experts=float(RANKS)),
        lambda: combine(lambda y, plan, w: (y.astype(jnp.int8), plan, w)),
        lambda: combine(lambda y, plan, w: (y, plan.arrays, w)),
    ],
    "UnavailableError": [
        lambda: lower("cpu"),
        lambda: lower("cuda", patches=[testing.pretend_build_without_cuda]),
        lambda: lower("cuda", patches=[testing.pretend_cuda_build], x=X[:, :3]),
        lambda: lower("cpu", "cuda", implementation=None, patches=[testing.pretend_cuda_build]),
    ],
}
