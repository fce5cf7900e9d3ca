"""The options of nnx.MoE against a loop over experts: biases, padding, chunks, initializers."""

from __future__ import annotations

from typing import Any

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep import routing
from jax_ep.nnx import MoE, MoEStats

HIDDEN, INTERMEDIATE, NUM_EXPERTS, TOP_K = 16, 8, 8, 2
ONE_DEVICE = testing.mesh_of((1,), ("expert",))

# The axes for 8 devices, and the options that go with them.
MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...], dict[str, Any]]] = {
    "expert": ((8,), ("expert",), {}),
    "all": (
        (2, 2, 2), ("data", "expert", "tensor"), {"fsdp_axis": "data", "tensor_axis": "tensor"},
    ),
    "four axes": (
        (1, 2, 2, 2), ("data", "fsdp", "expert", "tensor"),
        {"fsdp_axis": "fsdp", "tensor_axis": "tensor"},
    ),
    "sequence": ((2, 4), ("data", "expert"), {"sequence_axes": ("expert",)}),
}  # fmt: skip


def make_mesh(name: str, kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    shape, names, _ = MESHES[name]
    return testing.mesh_of(testing.fit(shape), names, axis_type=kind)


def make_layer(mesh: str | None = None, **options: Any) -> MoE:
    options = {"mesh": ONE_DEVICE} | options if mesh is None else MESHES[mesh][2] | options
    return MoE(HIDDEN, INTERMEDIATE, NUM_EXPERTS, TOP_K, rngs=nnx.Rngs(0), **options)


def tokens(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(1), (*shape, HIDDEN))


CLAMPED = jax_ep.ClampedSwiGlu(limit=2)


def gpt_oss(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Its activation, with a limit that some values reach."""
    gate, up = jnp.minimum(gate, 2), jnp.clip(up, -2, 2)
    return (up + 1) * gate * jax.nn.sigmoid(1.702 * gate)


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


def shifted(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Is not zero at zero."""
    return jax.nn.silu(gate) * up + 1


def dense(layer: MoE, x: jax.Array, token_mask: jax.Array | None = None) -> Any:
    """Every expert on every token; losses by `routing`, unsharded."""
    flat = x.reshape(-1, HIDDEN)
    mask = jnp.ones(len(flat), bool) if token_mask is None else token_mask.reshape(-1)
    logits = flat @ layer.router_kernel[...]
    if layer.logits_bias is not None:
        logits += layer.logits_bias[...]
    routed = routing.softmax_topk(logits, TOP_K, token_mask=mask)
    y = jnp.zeros_like(flat)
    functions = {"swiglu": swiglu, CLAMPED: gpt_oss}
    activation = functions.get(layer.config.activation, layer.config.activation)
    if layer.shared_w_up is not None:
        hidden = jnp.einsum("th,hcf->tcf", flat, layer.shared_w_up[...])
        y = activation(hidden[:, 0], hidden[:, 1]) @ layer.shared_w_down[...]
        if layer.shared_gate is not None:
            y /= 1 + jnp.exp(-flat @ layer.shared_gate[...])
        y = jnp.where(mask[:, None], y, 0)

    def of_expert(expert: int, w_up: Any, w_down: Any, b_up: Any, b_down: Any) -> jax.Array:
        weights = jnp.where(routed.topk_ids == expert, routed.topk_weights, 0).sum(-1)[:, None]
        on_input = layer.config.weights_on_input
        hidden = jnp.einsum("th,hcf->tcf", weights * flat if on_input else flat, w_up)
        if b_up is not None:
            hidden += b_up
        out = activation(hidden[:, 0], hidden[:, 1]) @ w_down
        if b_down is not None:
            out += b_down
        hits = (routed.topk_ids == expert).any(-1)[:, None]
        return jnp.where(hits, out, 0) if on_input else weights * out

    params = (layer.w_up, layer.w_down, layer.b_up, layer.b_down)
    params = [None if p is None else p[...] for p in params]
    y += jax.vmap(of_expert)(jnp.arange(NUM_EXPERTS), *params).sum(0)
    stats = MoEStats(
        aux_loss=routing.balancing_loss(routed.probabilities, routed.topk_ids),
        z_loss=routing.z_loss(logits, token_mask=mask),
        expert_load=routing.load(routed.topk_ids, NUM_EXPERTS),
        num_dropped=jnp.int32(0),
    )
    return y.reshape(x.shape), stats


def results(layer: MoE, x: jax.Array, token_mask: jax.Array | None = None, call: Any = None) -> Any:
    """(y, stats) and the gradients of a loss of all, as numpy."""
    call = call or (lambda layer, x: layer(x, token_mask=token_mask))

    def loss(layer: MoE, x: jax.Array) -> Any:
        y, stats = call(layer, x)
        return jnp.sin(y).sum() + stats.aux_loss + stats.z_loss, (y, stats)

    run = nnx.jit(nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (_, out), (grads, x_grad) = run(layer, x)
    return jax.tree.map(np.asarray, (out, nnx.to_pure_dict(nnx.state(grads)), x_grad))


def assert_close(got: Any, expected: Any, rtol: float = 5e-5) -> None:
    def check(path: Any, a: Any, b: Any) -> None:
        scale = np.abs(np.asarray(b, np.float32)).max(initial=0.0)
        message = jax.tree_util.keystr(path)
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * scale, err_msg=message)

    jax.tree_util.tree_map_with_path(check, got, expected)


class BiasTest(parameterized.TestCase):
    OPTIONS: dict[str, Any] = {
        "use_bias": True,
        "logits_bias": True,
        "activation": CLAMPED,
        "bias_init": nnx.initializers.normal(),
    }

    @parameterized.parameters(None, "expert", "all")
    def test_gpt_oss(self, mesh: str | None):
        """Biases of the router and of both matmuls, and its activation by name."""
        x = tokens(8, 3)
        reference = make_layer(**self.OPTIONS)
        expected = results(reference, x, call=lambda layer, x: dense(layer, x))
        with jax.set_mesh(ONE_DEVICE if mesh is None else make_mesh(mesh)):
            layer = make_layer(mesh, **self.OPTIONS)
            self.assertEqual(layer.b_up.shape, (NUM_EXPERTS, 2, INTERMEDIATE))
            assert_close(results(layer, x), expected)

    def test_a_plain_activation(self):
        layer = make_layer(use_bias=True, activation="relu")
        self.assertEqual(layer.b_up.shape, (NUM_EXPERTS, INTERMEDIATE))
        self.assertEqual(layer.b_down.shape, (NUM_EXPERTS, HIDDEN))
        self.assertFalse(layer.b_up[...].any())


class PaddingTest(parameterized.TestCase):
    @parameterized.parameters(None, "all")
    def test_nan_in_padding_reaches_nothing(self, mesh: str | None):
        """Padding tokens are neither routed nor counted, and no gradient sees them."""
        options = BiasTest.OPTIONS
        x, mask = tokens(8, 3), jax.random.bernoulli(jax.random.key(2), 0.6, (8, 3))
        reference = lambda layer, x: dense(layer, x, mask)
        expected = results(make_layer(**options), jnp.where(mask[..., None], x, 0), call=reference)
        with jax.set_mesh(ONE_DEVICE if mesh is None else make_mesh(mesh)):
            poisoned = jnp.where(mask[..., None], x, jnp.nan)
            got = results(make_layer(mesh, **options), poisoned, mask)
        assert_close(got, expected)
        (y, stats), *_ = got
        self.assertFalse(y[~np.asarray(mask)].any())
        self.assertEqual(stats.expert_load.sum(), TOP_K * mask.sum())

    @parameterized.parameters(
        ("expert", (1, 16)), ("expert", (3, 5)), ("all", (1, 1)), ("sequence", (2, 12)), ("sequence", (7,)),
    )  # fmt: skip
    def test_any_shape(self, mesh: str, shape: tuple[int, ...]):
        """One row of a sequence, uneven tokens, fewer tokens than ranks: as on one device."""
        expected = results(make_layer(), tokens(*shape))
        with jax.set_mesh(make_mesh(mesh)):
            assert_close(results(make_layer(mesh), tokens(*shape)), expected)

    @parameterized.parameters("expert", "sequence")
    def test_explicit_axes(self, mesh: str):
        for shape in (3, 5), (2, 8):
            expected = make_layer()(tokens(*shape))
            with jax.set_mesh(make_mesh(mesh, AxisType.Explicit)):
                got = make_layer(mesh)(tokens(*shape))
            assert_close(*jax.tree.map(np.asarray, (got, expected)))

    def test_a_sequence_stays_where_it_is(self):
        mesh = make_mesh("sequence", AxisType.Explicit)
        with jax.set_mesh(mesh):
            x = jax.device_put(tokens(2, 8), jax.NamedSharding(mesh, P("data", "expert")))
            layer = make_layer("sequence")
            program = jax.jit(lambda x: layer(x)[0]).lower(x)
            y = layer(x)[0]
        self.assertEqual(y.sharding.spec, P("data", "expert", None))
        self.assertNotIn("reshard", program.as_text())


class SharedExpertTest(parameterized.TestCase):
    @parameterized.product(mesh=[None, "expert", "all"], gate=[False, True])
    def test_dense(self, mesh: str | None, gate: bool):
        """Padding gets zeros, whatever the activation makes of them."""
        options = {"shared_intermediate_size": 4, "shared_gate": gate, "activation": shifted}
        x, mask = tokens(8, 3), jax.random.bernoulli(jax.random.key(2), 0.6, (8, 3))
        x = jnp.where(mask[..., None], x, 0)
        reference = lambda layer, x: dense(layer, x, mask)
        expected = results(make_layer(**options), x, call=reference)
        with jax.set_mesh(ONE_DEVICE if mesh is None else make_mesh(mesh)):
            layer = make_layer(mesh, **options)
            self.assertEqual(layer.shared_w_up.shape, (HIDDEN, 2, 4))
            assert_close(results(layer, x, mask), expected)

    def test_an_activation_without_a_derivative_at_zero(self):
        """Padding reaches no gradient, also on ranks that have nothing else: three of eight here."""
        root = lambda gate, up: jnp.sqrt(jnp.abs(gate)) * up
        options = {"shared_intermediate_size": 4, "activation": root}
        expected = results(make_layer(**options), tokens(9))
        with jax.set_mesh(make_mesh("expert")):
            assert_close(results(make_layer("expert", **options), tokens(9)), expected)


class WeightsOnInputTest(parameterized.TestCase):
    @parameterized.parameters((None, None), ("expert", "dispatch"), ("all", "experts"))
    def test_dense(self, mesh: str | None, remat: str | None):
        """Llama-4's, with biases, which no weight multiplies."""
        options = {"weights_on_input": True, "remat": remat, "use_bias": True}
        options |= {"bias_init": nnx.initializers.normal(), "shared_intermediate_size": 4}
        x = tokens(8, 3)
        expected = results(make_layer(**options), x, call=dense)
        with jax.set_mesh(ONE_DEVICE if mesh is None else make_mesh(mesh)):
            assert_close(results(make_layer(mesh, **options), x), expected)


class LocalOnlyTest(parameterized.TestCase):
    @parameterized.parameters("expert", "all")
    def test_same_numbers(self, mesh: str):
        """Every rank has the tokens of its data shard; nothing crosses the expert axis but a sum."""
        options = {"shared_intermediate_size": 4}
        expected = results(make_layer(**options), tokens(3, 2))
        with jax.set_mesh(make_mesh(mesh)):
            layer = make_layer(mesh, local_only=True, **options)
            assert_close(results(layer, tokens(3, 2)), expected)


class ExpertsFunctionTest(absltest.TestCase):
    def test_same_numbers(self):
        def experts(rows: jax.Array, sizes: jax.Array, w_up: jax.Array, w_down: jax.Array) -> Any:
            h = jax.lax.ragged_dot(rows, w_up.reshape(w_up.shape[0], HIDDEN, -1), sizes)
            h = swiglu(h[:, :INTERMEDIATE], h[:, INTERMEDIATE:])
            return jax.lax.ragged_dot(h, w_down, sizes)

        expected = results(make_layer(), tokens(8, 2))
        with jax.set_mesh(make_mesh("expert")):
            layer = make_layer("expert", experts_fn=experts)
            assert_close(results(layer, tokens(8, 2)), expected)

    def test_results_of_another_size(self):
        """Tokens that divide over the ranks, and tokens that are padded."""
        with jax.set_mesh(make_mesh("expert")):
            for x in tokens(8, 2), tokens(3):
                whole, part = (
                    make_layer("expert", experts_fn=lambda rows, *_, n=n: rows[:, :n])(x)[0]
                    for n in (HIDDEN, 8)
                )
                self.assertEqual(part.shape, (*x.shape[:-1], 8))
                testing.assert_bitwise(part, whole[..., :8])

    def test_the_result_has_the_dtype_of_the_layer(self):
        layer = make_layer(experts_fn=lambda rows, *_: rows.astype(jnp.float32))
        y, _ = layer(tokens(8).astype(jnp.bfloat16))
        self.assertEqual(y.dtype, jnp.bfloat16)

    def test_is_called_each_time(self):
        """It may close over state: no trace of an eager call is kept."""
        scale = 1.0
        layer = make_layer(experts_fn=lambda rows, *_: scale * rows)
        once, _ = layer(tokens(4))
        scale = 2.0
        assert_close(layer(tokens(4))[0], 2 * once)


class HalfPrecisionTest(parameterized.TestCase):
    @parameterized.parameters(
        (None, None, 1), ("four axes", "dispatch", 1), ("four axes", "experts", 2),
    )  # fmt: skip
    def test_gradients(self, mesh: str | None, remat: str | None, num_chunks: int):
        """bfloat16 within 1e-2, in norm, of float32 with the same values."""
        options = {"use_bias": True, "shared_intermediate_size": 4, "activation": gpt_oss}
        options |= {"bias_init": nnx.initializers.normal(), "param_dtype": jnp.bfloat16}
        x = tokens(8, 3).astype(jnp.bfloat16)
        wide = make_layer(**options)
        nnx.update(wide, jax.tree.map(lambda a: a.astype(jnp.float32), nnx.state(wide)))
        expected = results(wide, x.astype(jnp.float32), call=dense)
        with jax.set_mesh(ONE_DEVICE if mesh is None else make_mesh(mesh)):
            layer = make_layer(mesh, remat=remat, num_chunks=num_chunks, **options)
            got = results(layer, x)

        def check(path: Any, a: Any, b: Any) -> None:
            error = np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b)
            self.assertLess(error, 1e-2, jax.tree_util.keystr(path))

        jax.tree_util.tree_map_with_path(check, got[1:], expected[1:])


class ChunksTest(parameterized.TestCase):
    @parameterized.parameters({"num_chunks": 3}, {"num_chunks": 2, "remat": None}, {"remat": None})
    def test_same_numbers(self, **options: Any):
        """Tokens of a rank are padded to a multiple of the chunks: 5 here."""
        x = tokens(testing.NUM_DEVICES, 5)
        expected = results(make_layer(), x)
        with jax.set_mesh(make_mesh("expert")):
            assert_close(results(make_layer("expert", **options), x), expected)

    def test_they_reach_the_operation(self):
        for options, text in ({"num_chunks": 0}, "num_chunks=0"), ({"remat": "x"}, "remat='x'"):
            with self.assertRaisesRegex(ValueError, text):
                make_layer(**options)


class InitializerTest(absltest.TestCase):
    def test_each_matrix_by_itself(self):
        """An initializer sees [in, out], so that its fans are those of one expert."""
        shapes = []

        def record(key: Any, shape: Any, dtype: Any) -> jax.Array:
            shapes.append(shape)
            return jax.random.normal(key, shape, dtype)

        layer = make_layer(kernel_init=record)
        up, down = (HIDDEN, INTERMEDIATE), (INTERMEDIATE, HIDDEN)
        self.assertEqual(shapes, [(HIDDEN, NUM_EXPERTS), up, down])
        matrices = layer.w_up[...].swapaxes(1, 2).reshape(2 * NUM_EXPERTS, -1)
        self.assertLen(np.unique(matrices[:, 0]), 2 * NUM_EXPERTS)

    def test_biases(self):
        ones = nnx.initializers.ones
        layer = make_layer(use_bias=True, logits_bias=True, bias_init=ones)
        for bias in layer.b_up, layer.b_down, layer.logits_bias:
            np.testing.assert_array_equal(bias[...], 1)


if __name__ == "__main__":
    absltest.main()
