"""moe_mlp and nnx.MoE with overlap=True: the results of the same calls one after another."""

from __future__ import annotations

import functools
import re

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from flax import nnx

import jax_ep
import jax_ep.nnx
from jax_ep import quant

RANKS = testing.NUM_DEVICES
TOKENS, HIDDEN, INTERMEDIATE, TOP_K, LOCAL = 16, 128, 128, 3, 2


def arguments(dtype=np.float32):
    """ids and out_bar, then what has gradients, of all ranks."""
    rng = np.random.default_rng(0)
    sizes = testing.Sizes(RANKS, LOCAL, TOKENS, TOP_K)
    ids = testing.routings(sizes)["half"].reshape(-1, TOP_K)
    draw = lambda *shape: (rng.standard_normal(shape) / shape[-1] ** 0.5).astype(dtype)
    x, out_bar = draw(RANKS * TOKENS, HIDDEN), draw(RANKS * TOKENS, HIDDEN)
    weights = rng.random((RANKS * TOKENS, TOP_K), np.float32)
    experts = RANKS * LOCAL
    matrices = draw(experts, HIDDEN, 2, INTERMEDIATE), draw(experts, INTERMEDIATE, HIDDEN)
    shared = draw(RANKS * HIDDEN, 2, 128), draw(RANKS * 128, HIDDEN), draw(RANKS * HIDDEN, 1)
    return (ids, out_bar), (x, weights, *matrices, *shared)


def program(dtype=np.float32, *, remat=None, has_shared=True, **options):
    """Returns a function of the result, the statistics and all gradients, and its arguments."""

    def both(ids, out_bar, *floats):
        def layer(x, weights, w_up, w_down, shared_up, shared_down, gate):
            y, stats = jax_ep.moe_mlp(
                x,
                ids,
                weights,
                w_up,
                w_down,
                axis_name="expert",
                remat=remat,
                shared_expert=(shared_up, shared_down) if has_shared else None,
                shared_gate=gate if has_shared else None,
                **options,
            )
            return y, stats

        y, backward, stats = jax.vjp(layer, *floats, has_aux=True)
        return y, stats, backward(out_bar)

    constants, floats = arguments(dtype)
    return testing.sharded(both, testing.expert_mesh()), (*constants, *floats)


def results(dtype=np.float32, **options):
    f, operands = program(dtype, **options)
    return f(*operands)


class OverlapTest(parameterized.TestCase):
    def assert_same(self, got, expected):
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            if jnp.issubdtype(one.dtype, jnp.floating):
                testing.assert_close(one, other)
            else:
                np.testing.assert_array_equal(one, other)

    @parameterized.parameters((1, True), (2, False), (4, True))
    def test_values_and_gradients(self, num_chunks, has_shared):
        options = {"num_chunks": num_chunks, "has_shared": has_shared}
        self.assert_same(results(overlap=True, **options), results(overlap=False, **options))
        jax_ep.check()

    def assert_same_bits(self, got, expected):
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            testing.assert_bitwise(one, other)

    def assert_overlap_keeps_bits(self, function, *operands):
        """Compares the results of function(overlap, *operands) on each rank."""
        got, expected = (
            testing.sharded(functools.partial(function, overlap), testing.expert_mesh())(*operands)
            for overlap in (True, None)
        )
        self.assert_same_bits(got, expected)

    @parameterized.parameters((1, True, jnp.bfloat16), (2, False, np.float32))
    def test_backward_pass_that_sends_again(self, num_chunks, has_shared, dtype):
        options = {"num_chunks": num_chunks, "has_shared": has_shared, "remat": "dispatch"}
        got, expected = (results(dtype, overlap=o, **options) for o in (True, False))
        self.assert_same_bits(got, expected)
        jax_ep.check()

    def test_without_routing_weights(self):
        """And with biases."""
        rng = np.random.default_rng(1)
        draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
        experts = RANKS * LOCAL
        b_up, b_down = draw(experts, 2, INTERMEDIATE), draw(experts, HIDDEN)
        (ids, out_bar), (x, _, w_up, w_down, *_) = arguments()

        def both(overlap, ids, out_bar, *floats):
            def layer(x, w_up, w_down, b_up, b_down):
                return jax_ep.moe_mlp(
                    x, ids, None, w_up, w_down, axis_name="expert", b_up=b_up, b_down=b_down,
                    overlap=overlap,
                )[0]  # fmt: skip

            return jax.vjp(layer, *floats)[1](out_bar)

        self.assert_overlap_keeps_bits(both, ids, out_bar, x, w_up, w_down, b_up, b_down)

    def test_accumulators_of_a_scan(self):
        (ids, out_bar), (x, weights, w_up, w_down, *_) = arguments(jnp.bfloat16)

        def both(overlap, ids, out_bar, x, weights, *matrices):
            def layers(*matrices):
                stacks = [jnp.stack([m, m / 2]) for m in matrices]

                def step(carry, index):
                    x, accumulators = carry
                    y, _, accumulators = jax_ep.moe_mlp(
                        x, ids, weights, *stacks, axis_name="expert", num_experts=RANKS * LOCAL,
                        layer=index, accumulators=accumulators, overlap=overlap,
                    )  # fmt: skip
                    return (y, accumulators), None

                sums = jax_ep.accumulators(*stacks)
                return jax.lax.scan(step, (x, sums), jnp.arange(2))[0]

            (_, sums), backward = jax.vjp(layers, *matrices)
            return backward((out_bar, jax.tree.map(jnp.zeros_like, sums)))

        self.assert_overlap_keeps_bits(both, ids, out_bar, x, weights, w_up, w_down)

    def test_under_vmap(self):
        """In a layer that jax.checkpoint repeats."""
        (ids, out_bar), (x, weights, w_up, w_down, *_) = arguments()

        def both(overlap, ids, out_bar, *floats):
            def two_layers(x, *others):
                def layer(x):
                    return jax_ep.moe_mlp(x, ids, *others, axis_name="expert", overlap=overlap)[0]

                return jax.vmap(jax.checkpoint(layer))(jnp.stack([x, -x]))

            return jax.vjp(two_layers, *floats)[1](jnp.stack([out_bar, out_bar]))

        self.assert_overlap_keeps_bits(both, ids, out_bar, x, weights, w_up, w_down)

    def test_quantized_experts(self):
        options = {"num_chunks": 2, "quantization": quant.Recipe(), "num_comm_sms": 8}
        got, expected = (results(jnp.bfloat16, overlap=o, **options) for o in (True, False))
        self.assert_same(got, expected)

    def test_none_is_false(self):
        def text(overlap):
            f, operands = program(num_chunks=2, overlap=overlap)
            return re.sub(r"0x[0-9a-f]+", "", str(jax.make_jaxpr(f)(*operands)))

        self.assertEqual(text(None), text(False))
        self.assertNotEqual(text(None), text(True))

    def test_transfers_are_in_flight(self):
        def layer(ids, x, weights, w_up, w_down):
            return jax_ep.moe_mlp(
                x, ids, weights, w_up, w_down, axis_name="expert", remat=None, overlap=True,
                num_chunks=2,
            )[0]  # fmt: skip

        (ids, _), (x, weights, w_up, w_down, *_) = arguments()
        f = testing.sharded(layer, testing.expert_mesh())
        text = str(jax.make_jaxpr(f)(ids, x, weights, w_up, w_down))
        self.assertEqual(text.count("jax_ep.dispatch_start["), 2)
        self.assertEqual(text.count("jax_ep.combine_start["), 1)
        self.assertEqual(text.count("jax_ep.combine["), 1)  # nothing is left to run beside

    def test_module(self):
        x = jnp.asarray(arguments()[1][0]).reshape(RANKS, TOKENS, HIDDEN)
        outs = []
        for overlap in (True, None):
            with jax.set_mesh(testing.expert_mesh()):
                layer = jax_ep.nnx.MoE(
                    HIDDEN, INTERMEDIATE, 2 * RANKS, 2, shared_intermediate_size=64, num_chunks=2,
                    remat=None, overlap=overlap, rngs=nnx.Rngs(0),
                )  # fmt: skip
                outs.append(nnx.jit(lambda layer, x: layer(x)[0])(layer, x))
        testing.assert_close(*outs)

    @parameterized.parameters(
        ({"remat": "experts"}, "remat='experts'"),
        ({"remat": "dispatch", "quantization": quant.Recipe()}, "remat='dispatch' and quantized"),
        ({"remat": "dispatch", "weights_on_input": True}, "remat='dispatch' and weights_on_input"),
        ({"quantization": quant.Recipe(quantized_dispatch=True)}, "quantized transfers"),
        ({"activation": lambda h: h[:, 0] * h[:, 1]}, "a function of yours"),
    )
    def test_refused(self, change, given):
        def layer(ids, x, weights, w_up, w_down):
            options = {"remat": None} | change
            return jax_ep.moe_mlp(
                x, ids, weights, w_up, w_down, axis_name="expert", overlap=True, **options
            )[0]

        (ids, _), (x, weights, w_up, w_down, *_) = arguments(jnp.bfloat16)
        with self.assertRaisesRegex(jax_ep.ArgumentError, f"overlap=True is given with {given}"):
            f = testing.sharded(layer, testing.expert_mesh())
            jax.eval_shape(f, ids, x, weights, w_up, w_down)


if __name__ == "__main__":
    absltest.main()
