"""docs/errors.md is complete, true of the sources, and every message of Python on it is produced here."""

from __future__ import annotations

import contextlib
import functools
import re
import subprocess
import sys
import types
import unittest.mock

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
import programs
from absl.testing import absltest
from error_page import (
    BUILTIN,
    anonymous,
    compiled_templates,
    documented,
    python_templates,
    sections,
    to_regex,
)
from flax import nnx
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import jax_ep
import jax_ep.nnx
from jax_ep import quant

# ---- producing the messages


MESH = testing.expert_mesh()
RANKS = testing.NUM_DEVICES
X = np.ones((4 * RANKS, 8), np.float32)
IDS = np.zeros((4 * RANKS, 2), np.int32)
WEIGHTS = np.ones((4 * RANKS, 2), np.float32)
EIGHT_BIT = X.astype(jnp.float8_e4m3fn)


def inside(f, mesh=MESH):
    """Traces f(x, ids, weights) inside shard_map."""
    jax.eval_shape(
        jax.shard_map(f, mesh=mesh, in_specs=P("expert"), out_specs=P("expert")), X, IDS, WEIGHTS
    )


def symbolic_rows():
    """A matmul of a number of rows that is known only to the caller of the exported program."""
    rows = jax.ShapeDtypeStruct((*jax.export.symbolic_shape("rows"), 8), np.float32)
    rhs, sizes = np.ones((1, 8, 8), np.float32), np.ones(1, np.int32)
    jax.export.export(jax.jit(lambda lhs: jax_ep.grouped_matmul(lhs, rhs, sizes)))(rows)


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


def matmul_by_recipe(recipe=quant.Recipe(), shape=(2, 8, 8), dtype=np.float32, **options):
    lhs, rhs = X[:4].astype(dtype), np.ones(shape, dtype)
    return jax_ep.grouped_matmul(lhs, rhs, np.ones(2, np.int32), quantization=recipe, **options)


def each_quantized_fallback():
    """Lowers matmuls of quantized operands that no kernel takes, for each reason."""
    rows = quant.quantize(np.ones((4, 16), np.float32), quant.Fp8Row())
    weights = quant.quantize_weights(np.ones((2, 16, 8), np.float32), quant.Fp8Row())

    def lower(lhs, rhs):
        call = lambda: jax_ep.grouped_matmul(lhs, rhs, np.ones(2, np.int32))
        programs.lower_for_cuda(call)

    programs.lower_for_cuda(quantized_matmul)
    lower(quant.quantize(np.ones((4, 16), np.float32), quant.Fp8Block128()), weights)
    lower(quant.Quantized(rows.values, rows.scales[:1], rows.format), weights)
    with unittest.mock.patch.object(jax_ep._src.runtime, "compute_capabilities", lambda: {"8.0"}):
        lower(rows, weights)


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


def moe_mlp(num_experts=RANKS, up=(1, 8, 2, 4), **options):
    """The weights are constants, equal on all ranks: only `num_experts` allows that."""

    def f(x, ids, weights):
        call = {"axis_name": "expert", "num_experts": num_experts} | options
        return jax_ep.moe_mlp(x, ids, weights, jnp.ones(up), jnp.ones((1, 4, 8)), **call)[0]

    inside(f)


def layer(
    shape=(8, 4, 8),
    num_experts=8,
    top_k=2,
    axes=("data", "expert"),
    mask=None,
    quantized=None,
    **options,
):
    """Builds and calls nnx.MoE on a mesh of 2 * 4 ranks."""

    def build_and_call():
        moe = jax_ep.nnx.MoE(8, 4, num_experts, top_k, rngs=nnx.Rngs(0), **options)
        return moe(jnp.ones(shape), token_mask=mask, quantized_weights=quantized)[0]

    mesh = AbstractMesh((2, 4), axes, axis_types=(AxisType.Auto,) * 2)
    with jax.sharding.use_abstract_mesh(mesh):
        jax.eval_shape(build_and_call)


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


def fail(phase="entry"):
    assert jax_ep._src.runtime._ffi.post_report(1, 2, f"dispatch.{phase}", 3)
    jax_ep.check()


def call_outside(**options):
    jax_ep.dispatch(X, IDS, None, num_experts=RANKS, **({"axis_name": "expert"} | options))


def call_where_not_manual():
    with jax.set_mesh(MESH):
        jax.eval_shape(lambda: call_outside())


ids_as = lambda dtype: lambda x, ids, w: (x, ids.astype(dtype), w)

OTHER_MESH = AbstractMesh((8,), ("expert",), axis_types=(AxisType.Auto,))

PRODUCERS = {
    "ArgumentError": [
        call_outside,
        call_where_not_manual,
        lambda: dispatch(axis_name="data"),
        lambda: dispatch(axis_name=("expert", "expert")),
        lambda: dispatch(axis_name=()),
        explicit_sharding,
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
        lambda: dispatch(recv_capacity=8, capacity_factor=1.0),
        lambda: dispatch(capacity_factor=0.0),
        lambda: dispatch(capacity_factor=-1),
        lambda: dispatch(capacity_factor=float("nan")),
        lambda: dispatch(capacity_factor="large"),
        lambda: dispatch(num_sms=0),
        lambda: dispatch(implementation="triton"),
        lambda: redispatch(change=lambda x: x[:2]),
        lambda: redispatch(topk_weights=jnp.ones((4, 1))),
        lambda: combine(lambda y, plan, w: (y[:-1], plan, w)),
        lambda: combine(lambda y, plan, w: (y, plan, jnp.ones(3))),
        weighted_twice,
        lambda: matmul(num_groups=0),
        lambda: rhs_gradient(shape=(2, 6, 8)),
        lambda: rhs_gradient(transpose_rhs=True),
        lambda: rhs_gradient(out_gradient=(3, 6)),
        symbolic_rows,
        lambda: grouped_mlp(sizes=2),
        lambda: grouped_mlp(activation="relu"),
        lambda: grouped_mlp(activation="mish"),
        lambda: grouped_mlp(activation=None),
        lambda: grouped_mlp(activation=jax.nn.silu),
        lambda: grouped_mlp(down=(1, 8, 4)),
        lambda: grouped_mlp(up=(1, 8, 5)),
        lambda: grouped_mlp(num_sms=0),
        lambda: moe_mlp(activation="gelu"),
        lambda: moe_mlp(up=(1, 8, 4)),
        lambda: moe_mlp(up=(1, 7, 2, 4)),
        lambda: moe_mlp(num_experts=None) if RANKS > 1 else moe_mlp(up=(1, 8, 4)),
        lambda: moe_mlp(num_experts=2 * RANKS),
        lambda: moe_mlp(num_chunks=3),
        lambda: layer(num_chunks=0),
        lambda: layer(remat="all"),
        lambda: moe_mlp(remat="all"),
        lambda: moe_mlp(num_comm_sms=0),
        lambda: grouped_mlp(up=(2, 1, 8, 2, 4), down=(1, 1, 4, 8), layer=0),
        lambda: matmul_of_layer(2),
        lambda: matmul_of_layer(0, quantization=quant.Recipe()),
        lambda: rhs_gradient_of_layer(),
        lambda: moe_mlp(accumulators=jax_ep.Accumulators(X, X)),
        lambda: moe_mlp(experts_fn="tokamax"),
        lambda: moe_mlp(experts_fn=lambda rows, *_: rows, b_down=jnp.ones((1, 8))),
        lambda: layer(router="dice"),
        lambda: layer(router=CountingRouter()),
        lambda: layer(top_k=9),
        lambda: layer(top_k=0),
        lambda: layer(activation="mish"),
        lambda: layer(capacity_factor=-1),
        lambda: layer(quantized=FOR_TRAINING, fsdp_axis="data", quantization=quant.Recipe()),
        lambda: layer(shape=(8,)),
        lambda: layer(shape=(8, 7)),
        lambda: layer(mask=jnp.ones((8, 3), bool)),
        lambda: layer(num_experts=9),
        lambda: layer(tensor_axis="data"),
        lambda: layer(fsdp_axis="fdsp"),
        lambda: layer(axes=("a", "b")),
        lambda: layer(axes=("a", "b"), expert_axis=None),
        lambda: layer(mesh=OTHER_MESH),
        layer_without_mesh,
        lambda: jax_ep.routing.softmax_topk(X, 9),
        lambda: jax_ep.routing.sigmoid_topk(X, 2, num_groups=3),
        lambda: jax_ep.memory(8, 64, 32, 7, 2, 4),
        lambda: quant.Fp8Block128("up"),
        lambda: quant.dequantize(quant.Quantized(EIGHT_BIT, X[:, :2], quant.Fp8Block128())),
        lambda: quant.dequantize(quant.Quantized(EIGHT_BIT, X[0], quant.Fp8Row())),
        lambda: quant.quantize(np.ones((1, 129)), quant.Fp8Block128()).to_qwix(),
        lambda: quant.Quantized.from_qwix(
            types.SimpleNamespace(zero_point=X[:, :1]), quant.Fp8Row()
        ),
        lambda: quant.quantize(X, quant.Fp8Row(), scales=X),
        lambda: quant.quantize(X[:, :0], quant.Fp8Row()),
        lambda: quant.quantize_weights(X[0], quant.Fp8Row()),
        lambda: quant.Recipe(quant.Fp8Row(), quant.Fp8Block128()),
        lambda: matmul_by_recipe(quant.Recipe(quant.Fp8Row()), quantized_rhs=FOR_TRAINING),
        lambda: matmul_by_recipe(shape=(2, 8, 6), quantized_rhs=FOR_TRAINING),
        lambda: matmul_by_recipe(None, quantized_rhs=FOR_TRAINING),
        lambda: quantized_matmul(quantization=quant.Recipe()),
        lambda: grouped_mlp(quantization=quant.Recipe(), b_down=jnp.ones((1, 8))),
    ],
    "DtypeError": [
        lambda: dispatch(cast=lambda x, ids, w: (x.astype(jnp.int32), ids, w)),
        lambda: dispatch(cast=lambda x, ids, w: (x, ids, w.astype(jnp.int32))),
        lambda: dispatch(cast=lambda x, ids, w: (x, None, None)),
        lambda: dispatch(cast=ids_as(jnp.uint32)),
        lambda: dispatch(recv_capacity=8.5),
        lambda: dispatch(recv_capacity=jnp.int32(8) * jnp.ones(2)),
        lambda: dispatch(num_experts=float(RANKS)),
        lambda: combine(lambda y, plan, w: (y.astype(jnp.int8), plan, w)),
        lambda: combine(lambda y, plan, w: (y, plan.arrays, w)),
        lambda: matmul(lhs=jnp.float8_e4m3fn),
        lambda: matmul(lhs=jnp.bfloat16, rhs=jnp.float16),
        lambda: matmul(sizes=np.float32),
        lambda: jax_ep.grouped_matmul(X, np.ones((1, 8, 8), np.float32), [4]),
        lambda: grouped_mlp(w_down=jnp.bfloat16),
        lambda: matmul_of_layer(np.float32(1)),
        lambda: jax_ep.accumulators((X, X), X),
        lambda: grouped_mlp(b_down=jnp.ones((1, 8), np.int32)),
        lambda: matmul(preferred_element_type=jnp.bfloat16),
        lambda: rhs_gradient(accumulator=jnp.bfloat16),
        lambda: rhs_gradient(preferred_element_type=jnp.bfloat16),
        lambda: layer(router=lambda logits, top_k: jax.lax.top_k(logits, top_k)),
        lambda: quant.Fp8Row(jnp.float8_e4m3b11fnuz),
        lambda: quant.quantize(X, "fp8"),
        lambda: quant.quantize(X, quant.Fp8Row),
        lambda: quant.quantize(IDS, quant.Fp8Row()),
        lambda: quant.dequantize(quant.Quantized(X, X[:, :1], quant.Fp8Row())),
        lambda: quant.dequantize(X),
        lambda: quantized_matmul(rhs=np.ones((2, 8, 8), np.float32)),
        lambda: quantized_matmul(preferred_element_type=jnp.float16),
        lambda: quant.Recipe("fp8"),
        lambda: matmul_by_recipe(quant.Fp8Row()),
        lambda: matmul_by_recipe(quantized_rhs=FOR_TRAINING.forward),
        lambda: matmul_by_recipe(dtype=np.float16),
    ],
    "UnavailableError": [
        lambda: lower("cpu"),
        lambda: lower("cuda", patches=[testing.pretend_build_without_cuda]),
        lambda: lower("cuda", patches=[testing.pretend_cuda_build], x=X[:, :3]),
        lambda: lower("cpu", "cuda", implementation=None, patches=[testing.pretend_cuda_build]),
        second_derivative,
        lambda: jax.grad(lambda x: quant.quantize(x, quant.Fp8Row()).scales.sum())(X),
    ],
    "MissingExtensionError": [import_without_module],
    "PeerTimeoutError": [fail],
    "Error": [
        lambda: fail("mismatch"),
        lambda: fail("concurrent"),
        lambda: fail("workspace"),
    ],
}


class HostTest(absltest.TestCase):
    def test_check_says_why_the_host_has_ended_the_calls(self):
        message = "jax_ep: the host has ended the calls of this generation: a reason"
        assert jax_ep._src.runtime._ffi.post_report(0, 0, "host", 0, message)
        with self.assertRaisesRegex(jax_ep.Error, message):
            jax_ep.check()
        jax_ep.check()


class PageTest(absltest.TestCase):
    def test_python_messages_are_on_the_page(self):
        for name, templates in python_templates().items():
            with self.subTest(name):
                self.assertCountEqual(templates, [anonymous(t) for t in documented()[name]])

    def test_compiled_messages_are_on_the_page(self):
        section = sections()["Messages of the compiled module"]
        on_page = {anonymous(t) for t in re.findall(r"\| `([^`]*)` \|$", section, re.MULTILINE)}
        self.assertSetEqual(compiled_templates(), on_page)

    def test_every_class_has_its_section_and_builtin(self):
        for name, builtin in BUILTIN.items():
            self.assertIn(name, documented())
            self.assertTrue(issubclass(getattr(jax_ep, name), jax_ep.Error))
            self.assertTrue(issubclass(getattr(jax_ep, name), builtin))


class ProducedTest(absltest.TestCase):
    def test_every_message_is_produced(self):
        for name, producers in PRODUCERS.items():
            missing = {anonymous(template) for template in documented()[name]}
            for index, produce in enumerate(producers):
                with self.subTest(f"{name} {index}"):
                    with self.assertRaises(getattr(jax_ep, name)) as caught:
                        produce()
                    self.assertIsInstance(caught.exception, BUILTIN[name])
                    text = str(caught.exception)
                    fitting = [t for t in documented()[name] if to_regex(t).fullmatch(text)]
                    self.assertNotEmpty(fitting, text)
                    missing -= {anonymous(template) for template in fitting}
            with self.subTest(f"all of {name}"):
                self.assertEmpty(missing)

    def test_peer_timeout_has_its_parts(self):
        with self.assertRaises(jax_ep.PeerTimeoutError) as caught:
            fail()
        error = caught.exception
        self.assertEqual(
            (error.rank, error.peer, error.phase, error.sequence_number),
            (1, 2, "dispatch.entry", 3),
        )
        jax_ep.check()  # said once

    def test_reasons(self):
        """The table of reasons: each is given, in a warning, by what it says."""
        reasons = re.findall(r"^\| `([^`]*)` \| ", sections()["Warnings"], re.MULTILINE)
        patterns = [to_regex(reason) for reason in reasons]
        wide = AbstractMesh((300,), ("expert",), axis_types=(AxisType.Auto,))

        def on(mesh, hidden=8, top_k=2, recv_capacity=None, num_experts=None, **kwargs):
            def f(x, ids):
                return jax_ep.dispatch(
                    x,
                    ids,
                    None,
                    num_experts=num_experts or jax.lax.axis_size("expert"),
                    axis_name="expert",
                    recv_capacity=recv_capacity,
                ).rows

            tokens = mesh.shape["expert"]
            mapped = jax.shard_map(f, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))
            x, ids = programs.struct((tokens, hidden)), programs.struct((tokens, top_k), np.int32)
            programs.lower_for_cuda(mapped, x, ids, **kwargs)

        with programs.fallback_warnings() as messages:
            on(MESH, cuda_build=False)
            on(MESH, hidden=3)
            on(wide)
            on(MESH, top_k=65)
            on(MESH, num_experts=2048 + RANKS)
            on(MESH, recv_capacity=2**30 + 1)
            each_quantized_fallback()
        (template,) = documented()["Warnings"]
        for pattern in patterns:
            self.assertTrue(any(pattern.search(message) for message in messages), pattern)
        for message in messages:
            self.assertRegex(message, to_regex(template))
            self.assertTrue(any(pattern.search(message) for pattern in patterns), message)


if __name__ == "__main__":
    absltest.main()
