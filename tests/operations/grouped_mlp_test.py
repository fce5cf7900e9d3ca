"""grouped_mlp: values against numpy, gradients against JAX's own of a dense layer, poison in every tail."""

from __future__ import annotations

import functools
import pickle

import testing  # isort: skip

import grouped
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from grouped import ACTIVATIONS, CLAMPED, GATED, GROUP_SIZES
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep._src.matmul import activations

H, F, M, L = 16, 24, 32, 4
NAMES = ("rows", "w_up", "w_down", "row_weights", "b_up", "b_down")


def problem(
    sizes, activation="swiglu", *, dtype=np.float32, weight_dtype=None, biases=True, weights=True
):
    """(floats by NAMES, group_sizes, y_bar, where the tail begins)."""
    rng = np.random.default_rng(0)
    sizes = np.array(sizes, np.int32)
    draw = lambda *shape: rng.standard_normal(shape)
    up = (2, F) if activation in GATED else (F,)
    rows, y_bar, row_weights = draw(M, H), draw(M, H), rng.random(M).astype(np.float32)
    end = grouped.end_of(sizes, M)
    rows[end:] = y_bar[end:] = row_weights[end:] = np.nan
    matrices = draw(L, H, *up) / 2, draw(L, F, H) / 2
    floats = (
        rows.astype(dtype),
        *(m.astype(weight_dtype or dtype) for m in matrices),
        row_weights if weights else None,
        draw(L, *up).astype(weight_dtype or dtype) if biases else None,
        draw(L, H).astype(weight_dtype or dtype) if biases else None,
    )
    return floats, sizes, y_bar.astype(dtype), end


def mlp(floats, sizes, **options):
    rows, w_up, w_down, row_weights, b_up, b_down = floats
    return jax_ep.grouped_mlp(
        rows, w_up, w_down, sizes, row_weights, b_up=b_up, b_down=b_down, **options
    )


def expected_of(activation, floats, sizes):
    rows, w_up, w_down, *optional = floats
    return grouped.mlp(activation, rows, w_up, w_down, sizes, *optional)


@functools.cache
def compiled(activation="swiglu", **options):
    return jax.jit(functools.partial(mlp, activation=activation, **options))


@functools.cache
def gradients(activation="swiglu", **options):
    def f(floats, sizes, y_bar):
        call = functools.partial(mlp, sizes=sizes, activation=activation, **options)
        return jax.vjp(call, floats)[1](y_bar)[0]

    return jax.jit(f)


def dense(floats, sizes, activation):
    """In float32, without a tail: row by row, with the matrices of its group."""
    rows, w_up, w_down, row_weights, b_up, b_down = (
        None if a is None else jnp.asarray(a, jnp.float32) for a in floats
    )
    ends = np.minimum(np.cumsum(np.clip(sizes, 0, M).astype(np.int64)), M)
    group = np.searchsorted(ends, np.arange(len(rows)), side="right")
    pre = jnp.einsum("mh,mh...->m...", rows, w_up[group], precision="highest")
    pre = pre if b_up is None else pre + b_up[group]
    hidden = activations.activate(activation, pre.reshape(len(rows), w_up[0, 0].size))
    y = jnp.einsum("mf,mfh->mh", hidden, w_down[group], precision="highest")
    y = y if b_down is None else y + b_down[group]
    return y if row_weights is None else y * row_weights[:, None]


def without_tail(floats, end):
    rows, w_up, w_down, row_weights, *biases = floats
    return rows[:end], w_up, w_down, None if row_weights is None else row_weights[:end], *biases


class ValuesTest(parameterized.TestCase):
    @parameterized.product(activation=(*ACTIVATIONS, CLAMPED), dtype=testing.ROW_DTYPES)
    def test_every_kind_of_group_sizes(self, activation, dtype):
        for kind, sizes in GROUP_SIZES.items():
            floats, sizes, _, end = problem(sizes, activation, dtype=dtype)
            y = compiled(activation)(floats, sizes)
            self.assertEqual((y.dtype, y.shape), (dtype, (M, H)))
            expected = expected_of(activation, floats, sizes)
            testing.assert_close(y[:end], expected[:end], kind, steps=32)

    @parameterized.product(biases=[False, True], weights=[False, True])
    def test_optional_arguments(self, biases, weights):
        floats, sizes, _, end = problem(GROUP_SIZES["usual"], biases=biases, weights=weights)
        y = compiled()(floats, sizes)
        testing.assert_close(y[:end], expected_of("swiglu", floats, sizes)[:end], steps=32)

    @parameterized.parameters(jnp.bfloat16, jnp.float16)
    def test_master_weights(self, dtype):
        floats, sizes, _, end = problem(GROUP_SIZES["full"], dtype=dtype, weight_dtype=np.float32)
        y = compiled()(floats, sizes)
        self.assertEqual(y.dtype, dtype)
        testing.assert_close(y[:end], expected_of("swiglu", floats, sizes)[:end], steps=16)


class GradientsTest(parameterized.TestCase):
    def check(self, activation, floats, sizes, y_bar, end, message="", steps=64):
        """Against the dense layer in float32, within steps of the rows' dtype; dtypes are the primals'."""
        got = gradients(activation)(floats, sizes, y_bar)
        bar = y_bar[:end].astype(np.float32)
        cast = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), without_tail(floats, end))
        loss = lambda floats: (dense(floats, sizes, activation) * bar).sum()
        for name, a, b, given in zip(NAMES, got, jax.grad(loss)(cast), floats, strict=True):
            if given is not None:
                self.assertEqual(a.dtype, given.dtype, name)
                tail = np.asarray(a[len(b) :])
                testing.assert_bitwise(tail, np.zeros_like(tail), f"{message} tail of {name}")
                a = np.asarray(a[: len(b)], np.float32)
                testing.assert_close(a, b, f"{message} {name}", dtype=y_bar.dtype, steps=steps)

    @parameterized.parameters(*ACTIVATIONS, CLAMPED)
    def test_agree_with_the_dense_layer(self, activation):
        for kind, sizes in GROUP_SIZES.items():
            self.check(activation, *problem(sizes, activation), kind)

    @parameterized.product(biases=[False, True], weights=[False, True])
    def test_optional_arguments(self, biases, weights):
        self.check("swiglu", *problem(GROUP_SIZES["full"], biases=biases, weights=weights))

    @parameterized.product(
        dtype=[jnp.bfloat16, jnp.float16], weight_dtype=[None, np.float32], weights=[False, True]
    )
    def test_half_precision_and_master_weights(self, dtype, weight_dtype, weights):
        options = dict(dtype=dtype, weight_dtype=weight_dtype, weights=weights)
        self.check("swiglu", *problem(GROUP_SIZES["full"], **options), steps=16)

    @parameterized.parameters(*testing.ROW_DTYPES)
    def test_bias_gradients_are_float32_sums(self, dtype):
        """Exact: small integers times weights of 24 bits, of which a dtype of 16 bits holds fewer."""
        floats, sizes, y_bar, end = problem(
            GROUP_SIZES["full"], dtype=dtype, weight_dtype=np.float32
        )
        y_bar[:end] = np.sign(y_bar[:end].astype(np.float32)).astype(dtype)
        got = dict(zip(NAMES, gradients()(floats, sizes, y_bar), strict=True))
        ends = np.cumsum(sizes)
        terms = floats[3][:, None].astype(np.float64) * y_bar.astype(np.float64)
        for group, (start, stop) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            testing.assert_close(got["b_down"][group], terms[start:stop].sum(0), steps=8)
        # the bias's part of the row weights' gradient, alone
        zeros = floats[0], floats[1], 0 * floats[2], *floats[3:]
        weights_bar = gradients()(zeros, sizes, y_bar)[3]
        group = np.searchsorted(ends, np.arange(end), side="right")
        expected = (floats[5].astype(np.float64)[group] * y_bar[:end].astype(np.float64)).sum(1)
        testing.assert_close(weights_bar[:end], expected, steps=16)


class ClampedSwiGluTest(parameterized.TestCase):
    def test_is_a_value(self):
        same = pickle.loads(pickle.dumps(CLAMPED))
        self.assertEqual(hash(same), hash(CLAMPED))
        self.assertEqual(jax_ep.ClampedSwiGlu(7, np.float32(1.5)), jax_ep.ClampedSwiGlu(7.0, 1.5))
        self.assertNotEqual(jax_ep.ClampedSwiGlu(), CLAMPED)

    @parameterized.product(weights=[False, True], biases=[False, True])
    def test_agrees_with_a_function(self, weights, biases):
        """Which limits gate and up itself."""

        def clamped(gate, up):
            gate, up = jnp.minimum(gate, 1.3), jnp.clip(up, -1.3, 1.3)
            return (up + 1) * gate * jax.nn.sigmoid(1.6 * gate)

        arguments = problem(GROUP_SIZES["full"], CLAMPED, weights=weights, biases=biases)[:3]
        got, expected = (gradients(activation)(*arguments) for activation in (CLAMPED, clamped))
        for one, other in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
            testing.assert_close(one, np.asarray(other, np.float64), steps=64)


class FunctionTest(parameterized.TestCase):
    """A function as the activation: the same values, by matmuls and the function between them."""

    @parameterized.product(
        activation=("swiglu", "relu2"), weights=[False, True], biases=[False, True]
    )
    def test_agrees_with_the_named(self, activation, weights, biases):
        split = lambda h: h.reshape(len(h), -1)
        function = lambda h: activations.activate(activation, split(h))
        for kind in "usual", "negative", "far_past_the_end":
            floats, sizes, y_bar, end = problem(
                GROUP_SIZES[kind], activation, weights=weights, biases=biases
            )
            y, expected = compiled(function)(floats, sizes), compiled(activation)(floats, sizes)
            testing.assert_close(y[:end], expected[:end], kind, steps=32)
            got = gradients(function)(floats, sizes, y_bar)
            expected = gradients(activation)(floats, sizes, y_bar)
            for name, a, b in zip(NAMES, got, expected, strict=True):
                if a is not None:
                    testing.assert_close(a, b, f"{kind} {name}", steps=64)

    def test_may_close_over_parameters(self):
        """Whose gradients come from the groups' rows only."""
        floats, sizes, y_bar, end = problem(GROUP_SIZES["usual"], "relu")

        def f(beta):
            return mlp(floats, sizes, activation=lambda h: beta * jax.nn.relu(h))

        out, backward = jax.vjp(f, jnp.float32(1))
        testing.assert_close(out[:end], expected_of("relu", floats, sizes)[:end], steps=32)
        zeros = *floats[:5], 0 * floats[5]
        expected = (expected_of("relu", zeros, sizes) * y_bar)[:end].sum()
        testing.assert_close(backward(jnp.asarray(y_bar))[0], expected, steps=64)


class PlacesTest(parameterized.TestCase):
    """It is no collective: the same inside and outside shard_map, in loops, under vmap and checkpoint."""

    def test_eager_scan_checkpoint_and_vmap(self):
        floats, sizes, y_bar, end = problem(GROUP_SIZES["usual"])
        expected = np.asarray(compiled()(floats, sizes))
        testing.assert_bitwise(mlp(floats, sizes)[:end], expected[:end])
        two = jax.tree.map(lambda a: np.stack([a, a]), floats)
        for call in (
            jax.vmap(compiled(), (0, None)),
            lambda two, sizes: jax.lax.scan(lambda c, f: (c, mlp(f, sizes)), 0, two)[1],
        ):
            for out in call(two, sizes):
                testing.assert_bitwise(out[:end], expected[:end])
        again = jax.checkpoint(lambda floats: mlp(floats, sizes))
        got = jax.jit(lambda floats: jax.vjp(again, floats)[1](y_bar)[0])(floats)
        jax.tree.map(testing.assert_bitwise, got, gradients()(floats, sizes, y_bar))
        both = jax.vmap(gradients(), (0, None, None))(two, sizes, y_bar)
        jax.tree.map(lambda a, b: testing.assert_bitwise(a[1], np.asarray(b)), both, got)

    @parameterized.parameters(True, False)
    def test_inside_shard_map(self, check_vma):
        """Experts shared by all ranks get the sum of their gradients, rows their own."""
        floats, sizes, y_bar, end = problem(GROUP_SIZES["usual"])
        ranks = testing.NUM_DEVICES
        experts = [floats[i] for i in (1, 2, 4, 5)]
        every = lambda a: np.concatenate([a] * ranks)

        def f(rows, row_weights, w_up, w_down, b_up, b_down):
            y = mlp((rows, w_up, w_down, row_weights, b_up, b_down), sizes)
            return jax_ep.mask_tail(y, sizes)

        f = jax.shard_map(
            f,
            mesh=testing.expert_mesh(),
            in_specs=(P("expert"), P("expert"), P(), P(), P(), P()),
            out_specs=P("expert"),
            check_vma=check_vma,
        )
        arguments = every(floats[0]), every(floats[3]), *experts
        y, backward = jax.vjp(jax.jit(f), *arguments)
        testing.assert_close(y[:end], np.asarray(compiled()(floats, sizes))[:end])
        got = backward(jnp.asarray(every(y_bar)))
        expected = gradients()(floats, sizes, y_bar)
        for a, index in zip(got[2:], (1, 2, 4, 5), strict=True):
            testing.assert_close(a, ranks * np.asarray(expected[index]), NAMES[index])
        testing.assert_close(got[0], every(np.asarray(expected[0])))
        testing.assert_close(got[1], every(np.asarray(expected[3])))


if __name__ == "__main__":
    absltest.main()
