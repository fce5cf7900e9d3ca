"""Mistakes with grouped_mlp and moe_mlp: calls, by the class of their error."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import programs

import jax_ep
from errors.common import RANKS, X, inside


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


PRODUCERS = {
    "ArgumentError": [
        lambda: moe_mlp(overlap=True, remat="experts"),
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
        lambda: moe_mlp(remat="all"),
        lambda: moe_mlp(num_comm_sms=0),
        lambda: grouped_mlp(up=(2, 1, 8, 2, 4), down=(1, 1, 4, 8), layer=0),
        lambda: moe_mlp(accumulators=jax_ep.Accumulators(X, X)),
        lambda: jax_ep.accumulators(jnp.ones((2, 8, 2, 4)), jnp.ones((3, 4, 8))),
        lambda: moe_mlp(experts_fn="tokamax"),
        lambda: moe_mlp(experts_fn=lambda rows, *_: rows, b_down=jnp.ones((1, 8))),
        lambda: moe_mlp(shared_expert=X),
        lambda: moe_mlp(adapters=(X,)),
        lambda: moe_mlp(shared_gate=jnp.ones((8, 1))),
    ],
    "DtypeError": [
        lambda: grouped_mlp(w_down=jnp.bfloat16),
        lambda: jax_ep.accumulators((X, X), X),
        lambda: grouped_mlp(b_down=jnp.ones((1, 8), np.int32)),
        lambda: moe_mlp(accumulators=(X, X)),
    ],
}
