"""vmap of calls that share accumulators: chunks of tokens, and chains of the user's own calls."""

from __future__ import annotations

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from moe_layers import SIZES, layer, parameters

import jax_ep
from jax_ep import quant

BATCH = 2


def swiglu(h):
    return jax.nn.silu(h[:, 0]) * h[:, 1]


def chain(ids, x, topk_weights, w_up, w_down):
    """Two calls with the same matrices."""

    def calls(ids, x, topk_weights, w_up, w_down):
        sums = jax_ep.accumulators(w_up, w_down, like=x)
        for _ in range(2):
            x, _, sums = jax_ep.moe_mlp(
                x, ids, topk_weights, w_up, w_down, axis_name="expert", accumulators=sums
            )
        return x

    return testing.sharded(calls, SIZES.mesh)(ids, x, topk_weights, w_up, w_down)


class VmapTest(parameterized.TestCase):
    """The gradients of a batch are those of its elements: each has accumulators of its own."""

    @parameterized.product(
        options=[
            {},
            {"remat": None},
            {"remat": "experts"},
            {"activation": swiglu},
            {"activation": swiglu, "remat": None},
            {"quantization": quant.Recipe(), "remat": None},
        ],
        maps_weights=[False, True],
    )
    def test_chunks(self, options, maps_weights):
        f = layer(num_chunks=2, **options)
        self.check(
            lambda ids, x, weights, *matrices: f(ids, x, weights, *matrices, None, None)[0],
            maps_weights,
        )

    @parameterized.parameters(False, True)
    def test_a_chain(self, maps_weights):
        self.check(chain, maps_weights)

    def check(self, f, maps_weights):
        p = parameters(biases=False)
        floats = p.x, p.topk_weights, p.w_up, p.w_down
        mapped = [True, True, maps_weights, maps_weights]
        batch = [
            np.stack([a, a[::-1]]) if is_mapped else a
            for a, is_mapped in zip(floats, mapped, strict=True)
        ]
        ids = testing.merge_ranks(testing.routings(SIZES)["half"])
        axes = tuple(0 if is_mapped else None for is_mapped in mapped)
        vmapped = jax.vmap(f, (None, *axes))

        def loop(ids, *floats):
            pick = lambda i: [a[i] if m else a for a, m in zip(floats, mapped, strict=True)]
            return jnp.stack([f(ids, *pick(i)) for i in range(BATCH)])

        gradients = [
            jax.jit(jax.grad(lambda floats, g=g: jnp.sin(g(ids, *floats)).sum()))(batch)
            for g in (vmapped, loop)
        ]
        names = ("x", "topk_weights", "w_up", "w_down")
        for name, a, b in zip(names, *gradients, strict=True):
            testing.assert_close(a, np.asarray(b), name, steps=256)


if __name__ == "__main__":
    absltest.main()
