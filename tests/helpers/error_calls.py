"""Calls that make mistakes, one for each message of docs/reference/errors.md."""

from __future__ import annotations

import contextlib
import functools
import pickle
import re
import subprocess
import sys
import tempfile
import types
import unittest.mock

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
import programs
from flax import linen as nn
from flax import nnx
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from quantized import Fp8Block32, Mxfp8

import jax_ep
import jax_ep.linen
import jax_ep.nnx
from jax_ep import quant
from jax_ep._src.core import extension
from jax_ep._src.layer import domains
from jax_ep._src.matmul.grouped_matmul_mxfp4 import weights_only_matmul
from jax_ep._src.matmul.params import GroupedMatmulParams
from jax_ep._src.profile import profile as profile_module

MESH = testing.expert_mesh()
RANKS = testing.NUM_DEVICES
X = np.ones((4 * RANKS, 8), np.float32)
IDS = np.zeros((4 * RANKS, 2), np.int32)
WEIGHTS = np.ones((4 * RANKS, 2), np.float32)
EIGHT_BIT = X.astype(jnp.float8_e4m3fn)


def inside(f, mesh=MESH, **options):
    """Traces f(x, ids, weights) inside shard_map."""
    specs = {"in_specs": P("expert"), "out_specs": P("expert")}
    jax.eval_shape(jax.shard_map(f, mesh=mesh, **specs, **options), X, IDS, WEIGHTS)


def mesh_of_two_hosts(sizes, **options):
    devices = [types.SimpleNamespace(id=i, slice_index=i // 4) for i in range(8)]
    jax_ep.make_mesh(sizes, ("expert",), devices=devices, **options)


def layer_over_split_hosts():
    """Ranks 0 and 2 are on one host, 1 and 3 on another."""
    hosts = unittest.mock.patch.object(domains, "host_of", lambda device: device.id % 2)
    with hosts, jax.set_mesh(testing.mesh_of((4,), ("expert",))):
        jax_ep.nnx.MoE(8, 4, 8, 2, rngs=nnx.Rngs(0))(X)


def symbolic_rows():
    """A matmul of a number of rows that is known only to the caller of the exported program."""
    rows = jax.ShapeDtypeStruct((*jax.export.symbolic_shape("rows"), 8), np.float32)
    rhs, sizes = np.ones((1, 8, 8), np.float32), np.ones(1, np.int32)
    jax.export.export(jax.jit(lambda lhs: jax_ep.grouped_matmul(lhs, rhs, sizes)))(rows)


def symbolic_row_size():
    rows = jax.ShapeDtypeStruct((4, *jax.export.symbolic_shape("size")), np.float32)
    jax.eval_shape(lambda x: quant.quantize(x, quant.Fp8Block128()).values, rows)


def quantize_weights(variables):
    """A call of linen.MoE.quantize_weights with one thing wrong."""
    jax_ep.linen.MoE(8, 4, 8, 2, quantization=quant.Recipe()).quantize_weights(variables)


def profile(devices=("cuda",), problem="", **options):
    """A profile by a build whose kernels record, on devices that are not there."""
    recording = {
        "build_info": lambda: {"profile": True},
        "start_profile": lambda *arguments: problem,
        "stop_profile": lambda: ("", []),
        "profile_names": lambda: {},
    }
    local_devices = [types.SimpleNamespace(local_hardware_id=i) for i, _ in enumerate(devices)]
    with (
        unittest.mock.patch.object(profile_module, "_ffi", types.SimpleNamespace(**recording)),
        unittest.mock.patch.object(jax, "local_devices", lambda backend: local_devices),
        tempfile.TemporaryDirectory() as folder,
        jax_ep.profile(folder, **options) as recorded,
    ):
        pass
    return recorded


def profile_without_gpu():
    build = types.SimpleNamespace(build_info=lambda: {"profile": True})
    no_backend = unittest.mock.patch.object(jax, "local_devices", side_effect=RuntimeError)
    with unittest.mock.patch.object(profile_module, "_ffi", build), no_backend:
        jax_ep.profile("folder").__enter__()


def picture_without_matplotlib():
    with unittest.mock.patch.dict(sys.modules, {"jax_ep._src.profile.picture": None}):
        _ = profile().picture


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


def matmul(lhs=np.float32, rhs=np.float32, sizes=np.int32, num_groups=2, **options):
    jax.eval_shape(
        functools.partial(jax_ep.grouped_matmul, **options),
        programs.struct((4, 8), lhs),
        programs.struct((num_groups, 8, 8), rhs),
        programs.struct((num_groups,), sizes),
    )


def matmul_of_layer(layer, **options):
    rhs, sizes = np.ones((2, 1, 8, 8), np.float32), np.ones(1, np.int32)
    return jax_ep.grouped_matmul(X[:4], rhs, sizes, layer=layer, **options)


def rhs_gradient_of_layer():
    return jax_ep.grouped_matmul_rhs_gradient(X[:4], X[:4], np.ones(1, np.int32), layer=0)


def second_derivative():
    sizes, matrices = np.array([4], np.int32), np.ones((1, 8, 8), np.float32)
    first = jax.grad(lambda lhs: jax_ep.grouped_matmul(lhs, matrices, sizes).sum())
    jax.grad(lambda lhs: first(lhs).sum())(X)


def quantized_matmul(rhs=None, **options):
    lhs = quant.quantize(X[:4], quant.Fp8Row())
    if rhs is None:
        rhs = quant.quantize_weights(np.ones((2, 8, 8), np.float32), quant.Fp8Row())
    return jax_ep.grouped_matmul(lhs, rhs, np.ones(2, np.int32), **options)


FOR_TRAINING = quant.quantize_for_training(np.ones((2, 8, 8), np.float32), quant.Recipe())
ROW = quant.Fp8Row()
UP, DOWN = np.ones((8, 8, 2, 4), np.float32), np.ones((8, 4, 8), np.float32)
EXPERTS = quant.quantize_experts(UP, DOWN, quant.Recipe())
WEIGHTS_ONLY = quant.WeightsOnly(quant.MxFp4())
EXPERTS_WITH_OTHER_SCALES = [
    quant.QuantizedWeights(one.forward, one.forward.mT)
    for one in quant.quantize_experts(UP, DOWN, quant.Recipe(ROW))
]


def matmul_by_recipe(recipe=quant.Recipe(), shape=(2, 8, 8), dtype=np.float32, **options):
    lhs, rhs = X[:4].astype(dtype), np.ones(shape, dtype)
    return jax_ep.grouped_matmul(lhs, rhs, np.ones(2, np.int32), quantization=recipe, **options)


def gradient_of_quantized_weights():
    jax.grad(lambda weights: matmul_by_recipe(quantized_rhs=weights).sum())(FOR_TRAINING)


def gradient_by_one_layout():
    """A scale per channel belongs to one direction."""
    recipe, rhs = quant.Recipe(ROW), np.ones((2, 8, 8), np.float32)
    forward = quant.QuantizedWeights(quant.quantize_for_training(rhs, recipe).forward)
    options = {"quantization": recipe, "quantized_rhs": forward}
    matmul = functools.partial(jax_ep.grouped_matmul, **options)
    jax.grad(lambda lhs: matmul(lhs, rhs, np.ones(2, np.int32)).sum())(X[:4])


def moe_mlp_without_matrices(**options):
    """A call of moe_mlp without float matrices."""
    recipe = {"quantization": quant.Recipe()} if "quantized_weights" in options else {}
    options = {"axis_name": "expert"} | recipe | options
    inside(lambda *arrays: jax_ep.moe_mlp(*arrays, None, None, **options)[0])


def quantize_without_matrices():
    layer = jax_ep.nnx.MoE(
        8, 4, 8, 2, quantization=quant.Recipe(), quantized_only=True, rngs=nnx.Rngs(0)
    )
    layer.quantize_weights()


def each_quantized_fallback():
    """Lowers quantizing, and matmuls of quantized operands, that no kernel takes, for each reason."""
    rows = quant.quantize(np.ones((4, 16), np.float32), quant.Fp8Row())
    weights = quant.quantize_weights(np.ones((2, 16, 8), np.float32), quant.Fp8Row())

    def lower(lhs, rhs):
        call = lambda: jax_ep.grouped_matmul(lhs, rhs, np.ones(2, np.int32))
        programs.lower_for_cuda(call)

    programs.lower_for_cuda(quantized_matmul)
    with jax.enable_x64(True):
        wide = np.ones((2, 16, 8), np.float64)
        programs.lower_for_cuda(lambda: quant.quantize_weights(wide, quant.Fp8Block128()))
    lower(quant.quantize(np.ones((4, 16), np.float32), quant.Fp8Block128()), weights)
    lower(quant.Quantized(rows.values, rows.scales[:1], rows.format), weights)
    others = quant.quantize(np.ones((64, 64), np.float32), Fp8Block32())
    programs.lower_for_cuda(lambda: quant.quantize(np.ones((4, 32), np.float32), Mxfp8()))
    send = functools.partial(jax_ep.dispatch, num_experts=8, axis_name="expert")
    sent = jax.shard_map(
        lambda rows, ids: send(rows, ids, None).rows.scales,
        mesh=testing.expert_mesh(1),
        in_specs=P("expert"),
        out_specs=P("expert"),
    )
    programs.lower_for_cuda(lambda: sent(others, np.zeros((64, 2), np.int32)))
    with unittest.mock.patch.object(
        jax_ep._src.core.runtime, "compute_capabilities", lambda: {"8.0"}
    ):
        lower(rows, weights)
        lower_four_bits()
    lower_four_bits(dtype=np.float16)
    lower_four_bits(format=quant.MxFp8())
    lower_four_bits(columns=12)
    lower_four_bits(num_scales=1)


def lower_four_bits(dtype=jnp.bfloat16, format=quant.MxFp4(), columns=8, num_scales=None):
    weights = quant.quantize(np.ones((2, columns, 64), np.float32), format)
    weights = quant.Quantized(weights.values, weights.scales[:, :num_scales], format)
    params = GroupedMatmulParams(
        transpose_rhs=True, out_dtype=dtype, zero_tail=True, num_sms=0, implementation=None
    )
    rows = jnp.ones((4, 64), dtype)
    sizes = np.ones(2, np.int32)
    programs.lower_for_cuda(lambda: weights_only_matmul(rows, weights, sizes, params))


def rhs_gradient(accumulator=np.float32, shape=(2, 8, 6), out_gradient=(4, 6), **options):
    jax.eval_shape(
        lambda *arrays, accumulator: jax_ep.grouped_matmul_rhs_gradient(
            *arrays, accumulator=accumulator, **options
        ),
        programs.struct((4, 8), jnp.bfloat16),
        programs.struct(out_gradient, jnp.bfloat16),
        programs.struct((2,), np.int32),
        accumulator=programs.struct(shape, accumulator),
    )


def grouped_mlp(sizes=1, up=(1, 8, 2, 4), down=(1, 4, 8), w_down=np.float32, **options):
    rows, w_up = programs.struct((4, 8)), programs.struct(up)
    f = functools.partial(jax_ep.grouped_mlp, **options)
    jax.eval_shape(
        f, rows, w_up, programs.struct(down, w_down), programs.struct((sizes,), np.int32)
    )


def moe_mlp(num_experts=RANKS, up=(1, 8, 2, 4), check_vma=True, **options):
    """The weights are constants, equal on all ranks: only `num_experts` allows that."""

    def f(x, ids, weights):
        call = {"axis_name": "expert", "num_experts": num_experts} | options
        return jax_ep.moe_mlp(x, ids, weights, jnp.ones(up), jnp.ones((1, 4, 8)), **call)[0]

    inside(f, check_vma=check_vma)


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


def tune_on(gpu="a GPU", top_k=2, **options):
    """Calls tune as on a machine of that GPU; none if the name is empty."""
    with unittest.mock.patch.object(jax_ep._src.core.runtime, "gpu_kind", lambda: gpu):
        jax_ep.tune("unwritten.json", 8, 8, num_experts=RANKS, top_k=top_k, **options)


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


def quantize_without_a_recipe():
    jax_ep.nnx.MoE(8, 4, 8, 2, rngs=nnx.Rngs(0)).quantize_weights()


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


def import_without_module():
    """In a fresh Python in which jax_ep._ffi cannot be imported."""
    code = "import sys; sys.modules['jax_ep._ffi'] = None; import jax_ep"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    message = re.search(r"MissingExtensionError: (.*)", result.stderr)
    assert message, result.stderr
    raise jax_ep.MissingExtensionError(message[1])


def load_plugin(version):
    """Finds a plugin of a version, whose compiled module cannot be imported."""
    with testing.plugin_package(version, "raise ImportError('a reason')"):
        extension.plugin_module("0.1.0")


def fail(phase="entry"):
    assert jax_ep._src.core.runtime._ffi.post_report(1, 2, f"dispatch.{phase}", 3)
    jax_ep.check()


def call_outside(**options):
    jax_ep.dispatch(X, IDS, None, num_experts=RANKS, **({"axis_name": "expert"} | options))


def call_where_not_manual():
    with jax.set_mesh(MESH):
        jax.eval_shape(lambda: call_outside())


ids_as = lambda dtype: lambda x, ids, w: (x, ids.astype(dtype), w)

OTHER_MESH = AbstractMesh((8,), ("expert",), axis_types=(AxisType.Auto,))
