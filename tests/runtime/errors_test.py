"""docs/reference/errors.md is complete, true of the sources, and every message of Python on it is produced here."""

from __future__ import annotations

import re
import types
import unittest.mock

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
import programs
from absl.testing import absltest
from checkpoint_errors import PRODUCERS as CHECKPOINT_PRODUCERS
from checkpoint_errors import load_without_rich
from error_calls import (
    DOWN,
    EIGHT_BIT,
    EXPERTS,
    EXPERTS_WITH_OTHER_SCALES,
    FOR_TRAINING,
    IDS,
    MESH,
    OTHER_MESH,
    RANKS,
    ROW,
    UP,
    WEIGHTS_ONLY,
    CountingRouter,
    X,
    call_outside,
    call_where_not_manual,
    combine,
    dispatch,
    each_quantized_fallback,
    explicit_sharding,
    fail,
    gradient_by_one_layout,
    gradient_of_quantized_weights,
    grouped_mlp,
    ids_as,
    import_without_module,
    layer,
    layer_of_another_mesh,
    layer_over_split_hosts,
    layer_without_mesh,
    linen_layer,
    load_plugin,
    lower,
    matmul,
    matmul_by_recipe,
    matmul_of_layer,
    mesh_of_two_hosts,
    moe_mlp,
    moe_mlp_without_matrices,
    other_mesh,
    picture_without_matplotlib,
    profile,
    profile_without_gpu,
    quantize_weights,
    quantize_without_a_recipe,
    quantize_without_matrices,
    quantized_matmul,
    quantized_per_tensor,
    redispatch,
    rhs_gradient,
    rhs_gradient_of_layer,
    second_derivative,
    stack,
    stack_with_a_linen_router,
    stack_without_metadata,
    start,
    symbolic_row_size,
    symbolic_rows,
    tune_on,
    unpickle_without_devices,
    weighted_twice,
)
from error_page import (
    BUILTIN,
    anonymous,
    compiled_templates,
    documented,
    python_templates,
    sections,
    to_regex,
)
from flax import serialization
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import jax_ep
import jax_ep.nnx
from jax_ep import quant
from jax_ep._src.transfer import primitives

PRODUCERS = {
    "ArgumentError": [
        lambda: quant.blocked_scales(X),
        lambda: quant.blocked_scales(jnp.ones((2, 2), jnp.uint8), X),
        *CHECKPOINT_PRODUCERS,
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
        layer_over_split_hosts,
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
        lambda: tune_on(mesh=testing.mesh_of((2, 2), ("data", "expert"))),
        lambda: tune_on(top_k=RANKS + 1),
        lambda: jax_ep.use_tuning("/no/such/file"),
        lambda: moe_mlp(overlap=True, remat="experts"),
        lambda: start(use=jax_ep.combine_done),
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
        lambda: grouped_mlp(activation=jax_ep.ClampedSwiGlu),
        lambda: jax_ep.ClampedSwiGlu(limit=0),
        lambda: grouped_mlp(down=(1, 8, 4)),
        lambda: grouped_mlp(up=(1, 8, 5)),
        lambda: grouped_mlp(up=(2, 1, 8, 2, 4), down=(2, 1, 4, 8)),
        lambda: grouped_mlp(layer=0),
        lambda: moe_mlp(shared_expert=(jnp.ones((8, 2, 5)), jnp.ones((6, 8)))),
        lambda: moe_mlp(shared_expert=(jnp.ones((8, 2, 5)), jnp.ones((5, 7)))),
        lambda: grouped_mlp(num_sms=0),
        lambda: moe_mlp(activation="gelu"),
        lambda: moe_mlp(up=(1, 8, 4)),
        lambda: moe_mlp(up=(1, 7, 2, 4)),
        lambda: moe_mlp(num_experts=None) if RANKS > 1 else moe_mlp(up=(1, 8, 4)),
        lambda: moe_mlp(num_experts=None, check_vma=False) if RANKS > 1 else moe_mlp(up=(1, 8, 4)),
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
        lambda: jax_ep.accumulators(jnp.ones((2, 8, 2, 4)), jnp.ones((3, 4, 8))),
        lambda: moe_mlp(experts_fn="tokamax"),
        lambda: moe_mlp(experts_fn=lambda rows, *_: rows, b_down=jnp.ones((1, 8))),
        lambda: layer(router="dice"),
        lambda: layer(router=CountingRouter()),
        unpickle_without_devices,
        lambda: layer(top_k=9),
        lambda: layer(top_k=0),
        lambda: layer(activation="mish"),
        lambda: layer(capacity_factor=-1),
        lambda: layer(quantized=EXPERTS, fsdp_axis="data", quantization=quant.Recipe()),
        quantize_without_a_recipe,
        quantize_without_matrices,
        lambda: layer(quantized_only=True),
        lambda: layer(quantization=WEIGHTS_ONLY),
        lambda: grouped_mlp(quantization=WEIGHTS_ONLY),
        lambda: layer(quantized_only=True, quantization=quant.Recipe()),
        moe_mlp_without_matrices,
        lambda: moe_mlp_without_matrices(quantized_weights=EXPERTS, quantization=None),
        lambda: moe_mlp_without_matrices(quantized_weights=EXPERTS, layer=0),
        lambda: moe_mlp_without_matrices(quantized_weights=EXPERTS, accumulators=(UP, DOWN)),
        lambda: quant.experts_from_checkpoint((FOR_TRAINING.forward,) * 3, FOR_TRAINING.forward),
        lambda: quant.experts_from_checkpoint((FOR_TRAINING.forward,) * 2, FOR_TRAINING.forward),
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
        lambda: jax_ep.memory(8, 64, 32, 8, 2, 2**10),
        lambda: profile(max_records=0),
        lambda: profile(max_records=2**24 + 1),
        lambda: quant.Fp8Block128("up"),
        lambda: quant.Fp8Block128(min_amax=0),
        lambda: quant.dequantize(quant.Quantized(EIGHT_BIT, X[:, :2], quant.Fp8Block128())),
        lambda: quant.dequantize(quant.Quantized(EIGHT_BIT, X[0], quant.Fp8Row())),
        lambda: quant.quantize(np.ones((1, 129)), quant.Fp8Block128()).to_qwix(),
        lambda: serialization.from_state_dict(FOR_TRAINING.forward, {"values": X}),
        lambda: quant.Quantized.from_qwix(
            types.SimpleNamespace(zero_point=X[:, :1]), quant.Fp8Row()
        ),
        lambda: quant.quantize(X, quant.Fp8Row(), scales=X),
        lambda: quant.quantize(X[:, :0], quant.Fp8Row()),
        lambda: quant.quantize_weights(X[0], quant.Fp8Row()),
        lambda: quant.Recipe(quant.Fp8Row(), quant.Fp8Block128()),
        lambda: quant.Recipe(quant.NvFp4()),
        lambda: quant.quantize(X, ROW, tensor_scale=1.0),
        lambda: dispatch(cast=lambda x, *others: (quant.quantize(x, quant.NvFp4()), *others)),
        lambda: matmul_by_recipe(quant.Recipe(quant.Fp8Row()), quantized_rhs=FOR_TRAINING),
        lambda: matmul_by_recipe(shape=(2, 8, 6), quantized_rhs=FOR_TRAINING),
        lambda: matmul_by_recipe(None, quantized_rhs=FOR_TRAINING),
        lambda: quantized_matmul(quantization=quant.Recipe()),
        lambda: grouped_mlp(quantization=quant.Recipe(), b_down=jnp.ones((1, 8))),
        lambda: layer(quantized=EXPERTS_WITH_OTHER_SCALES, quantization=quant.Recipe(ROW)),
        lambda: quantize_weights({}),
        lambda: quantize_weights(UP),
        lambda: quantize_weights({"params": {"w_up": UP[None], "w_down": DOWN[None]}}),
        symbolic_row_size,
        lambda: moe_mlp(shared_expert=X),
        lambda: moe_mlp(adapters=(X,)),
        lambda: moe_mlp(shared_gate=jnp.ones((8, 1))),
        lambda: layer(shared_gate=True),
        lambda: linen_layer(("exp",)),
        lambda: linen_layer({"experts": "exp"}),
        lambda: linen_layer({"experts": "exp"}, (("exp", "expert"),), fsdp_axis="data"),
        lambda: layer(router=lambda logits, top_k: None, ids=jnp.zeros((8, 4, 2), jnp.int32)),
        lambda: layer(
            weights_on_input=True, quantization=quant.Recipe(ROW, quantized_dispatch=True)
        ),
        lambda: quant.quantize_experts(DOWN, UP, quant.Recipe()),
        lambda: quant.quantize_experts(UP[:2], DOWN, quant.Recipe()),
        lambda: quant.quantize_experts((UP[:, :, 0], UP[:, :4, 1]), DOWN, quant.Recipe()),
        lambda: quant.quantize_experts((), DOWN, quant.Recipe()),
    ],
    "DtypeError": [
        lambda: start(cast=lambda x: quant.quantize(x, quant.Fp8Row())),
        lambda: start(use=lambda in_flight: jax_ep.dispatch_done(in_flight.results)),
        lambda: quant.quantize_for_training(DOWN, WEIGHTS_ONLY),
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
        lambda: moe_mlp(accumulators=(X, X)),
        lambda: layer(param_dtype=jnp.float8_e4m3fn),
        lambda: layer(dtype=jnp.int32),
        lambda: jax_ep.memory(8, 64, 32, 8, 2, 4, dtype=jnp.int32),
        lambda: jax_ep.memory(8, 64, 32, 8, 2, 4, activation=jax.nn.silu),
        lambda: layer(sequence_axes=None),
        lambda: layer(mesh="expert"),
        lambda: layer(mask=jnp.ones((8, 4))),
        lambda: jax_ep.routing.softmax_topk(X, 2.0),
        lambda: jax_ep.routing.softmax_topk(quant.quantize(X, ROW), 2),
        lambda: layer(router=lambda logits, top_k: jax.lax.top_k(logits, top_k)),
        lambda: quant.Fp8Row(jnp.float8_e4m3b11fnuz),
        lambda: quant.quantize(X, "fp8"),
        lambda: quant.quantize(X, quant.Fp8Row),
        lambda: quant.quantize(IDS, quant.Fp8Row()),
        lambda: quant.dequantize(quant.Quantized(X, X[:, :1], quant.Fp8Row())),
        lambda: quant.dequantize(quant.Quantized(EIGHT_BIT, EIGHT_BIT, quant.Fp8Row())),
        lambda: quant.dequantize(X),
        lambda: quant.dequantize(quant.quantize(X, ROW), jnp.int32),
        lambda: quant.dequantize(quant.quantize(X, ROW), jnp.float8_e4m3fn),
        lambda: quant.dequantize(quant.quantize(X, ROW), "fp8"),
        lambda: quant.dequantize(quant.Quantized(EIGHT_BIT, X[:, :1], quant.Fp8Row)),
        lambda: quant.dequantize(quant.Quantized(EIGHT_BIT, X[:, :1], "fp8")),
        lambda: quant.dequantize(quant.Quantized(EIGHT_BIT, 1.0, ROW)),
        lambda: quant.quantize(X, quant.NvFp4(), tensor_scale=X[0]),
        lambda: quant.Quantized.from_qwix(X, ROW),
        lambda: quant.Fp8Row("fp8"),
        lambda: quant.quantize(EIGHT_BIT, ROW),
        lambda: quant.quantize(quant.quantize(X, ROW), ROW),
        lambda: quant.quantize(X, ROW, scales="auto"),
        lambda: quant.Recipe(None),
        lambda: quant.Recipe(quantized_dispatch="yes"),
        lambda: quant.Recipe(quantized_cotangents=1),
        lambda: quant.quantize(X, ROW).packed(),
        lambda: quantized_matmul(rhs=np.ones((2, 8, 8), np.float32)),
        lambda: quantized_matmul(preferred_element_type=jnp.float16),
        lambda: quant.Recipe("fp8"),
        lambda: matmul_by_recipe(quant.Fp8Row()),
        lambda: matmul_by_recipe(quantized_rhs=FOR_TRAINING.forward),
        lambda: matmul_by_recipe(dtype=np.float16),
        lambda: matmul_by_recipe(quantized_rhs=quant.QuantizedWeights(FOR_TRAINING.forward, X)),
        lambda: jax_ep.grouped_matmul(X, FOR_TRAINING, np.ones(2, np.int32)),
        lambda: quantized_matmul(preferred_element_type="fp8"),
        lambda: layer(quantized=EXPERTS[0], quantization=quant.Recipe()),
        lambda: quant.experts_from_checkpoint(UP, FOR_TRAINING.forward),
        lambda: moe_mlp_without_matrices(quantized_weights=(UP, DOWN)),
        lambda: grouped_mlp(quantization=quant.Recipe(), quantized_weights=EXPERTS[0]),
        lambda: grouped_mlp(quantization=quant.Recipe(), quantized_weights=(*EXPERTS, None)),
    ],
    "UnavailableError": [
        lambda: tune_on(gpu=""),
        lambda: lower("cpu"),
        lambda: lower("cuda", patches=[testing.pretend_build_without_cuda]),
        lambda: lower("cuda", patches=[testing.pretend_cuda_build], x=X[:, :3]),
        lambda: lower("cpu", "cuda", implementation=None, patches=[testing.pretend_cuda_build]),
        second_derivative,
        lambda: jax.grad(lambda x: quant.quantize(x, quant.Fp8Row()).scales.sum())(X),
        gradient_of_quantized_weights,
        gradient_by_one_layout,
        lambda: jax_ep.profile("folder").__enter__(),
        profile_without_gpu,
    ],
    "MissingExtensionError": [
        import_without_module,
        load_without_rich,
        picture_without_matplotlib,
        lambda: load_plugin("0.0.9"),
        lambda: load_plugin("0.1.0"),
    ],
    "PeerTimeoutError": [fail],
    "Error": [
        lambda: fail("mismatch"),
        lambda: fail("concurrent"),
        lambda: fail("workspace"),
        lambda: profile(problem="another profile is being recorded"),
    ],
}


class HostTest(absltest.TestCase):
    def test_check_says_why_the_host_has_ended_the_calls(self):
        message = "jax_ep: the host has ended the calls of this generation: a reason"
        assert jax_ep._src.core.runtime._ffi.post_report(0, 0, "host", 0, message)
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

    def test_float_dtypes_have_their_advice(self):
        for produce, advice in (
            (
                lambda: layer(param_dtype=jnp.float8_e4m3fn),
                r"MoE: param_dtype=float8_e4m3fn; .*quantization=jax_ep.quant.Recipe\(\)\.$",
            ),
            (
                lambda: quant.dequantize(quant.quantize(X, ROW), jnp.int8),
                r"quant.dequantize: dtype=int8; .*jnp.float32 for all bits of the products\.$",
            ),
        ):
            with self.assertRaisesRegex(jax_ep.DtypeError, advice):
                produce()

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

        def on(mesh, hidden=8, top_k=2, num_experts=None, lowering=None, **options):
            def f(x, ids):
                return jax_ep.dispatch(
                    x,
                    ids,
                    None,
                    num_experts=num_experts or jax.lax.axis_size("expert"),
                    axis_name="expert",
                    **options,
                ).rows

            tokens = mesh.shape["expert"]
            mapped = jax.shard_map(f, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))
            x, ids = programs.struct((tokens, hidden)), programs.struct((tokens, top_k), np.int32)
            programs.lower_for_cuda(mapped, x, ids, **lowering or {})

        with programs.fallback_warnings() as messages:
            on(MESH, lowering={"cuda_build": False})
            on(MESH, hidden=3)
            on(wide)
            on(MESH, top_k=65)
            on(MESH, num_experts=2048 + RANKS)
            on(MESH, recv_capacity=2**30 + 1)
            on(MESH, nvlink_domain_size=1, hidden=2**18)
            on(AbstractMesh((128,), ("expert",), axis_types=wide.axis_types), nvlink_domain_size=1)
            with unittest.mock.patch.object(primitives, "host_of", lambda device: device.id):
                on(MESH, nvlink_domain_size=1)
            each_quantized_fallback()
        template, *_ = documented()["Warnings"]
        for pattern in patterns:
            self.assertTrue(any(pattern.search(message) for message in messages), pattern)
        for message in messages:
            self.assertRegex(message, to_regex(template))
            self.assertTrue(any(pattern.search(message) for pattern in patterns), message)


if __name__ == "__main__":
    absltest.main()
