"""Counts what a backward pass repeats programs lowered for CUDA, as docs/data/remat.json has it."""

from __future__ import annotations

import functools
import json
import pathlib

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax.sharding import PartitionSpec as P
from programs import lower_for_cuda, struct

import jax_ep

RANKS = testing.NUM_DEVICES
H, F, L, K = 64, 32, 4, 2
TABLE = pathlib.Path(__file__).parents[2] / "docs" / "data" / "remat.json"
MODES = (None, "dispatch", "experts")
ACTIVATIONS = {
    "activation with a name": "swiglu",
    "a function": lambda gate, up: jnp.tanh(gate) * up,
}

names = jax.checkpoint_policies.save_only_these_names
CHECKPOINTS = {
    "no checkpoint": lambda f: f,
    "`jax.checkpoint`": jax.checkpoint,
    "policy saves `REMAT_NAMES`": lambda f: jax.checkpoint(f, policy=names(*jax_ep.REMAT_NAMES)),
    "policy saves the plan and the result": lambda f: jax.checkpoint(
        f, policy=names("jax_ep.plan", "jax_ep.combined")
    ),
}


def arguments():
    tokens, experts = 16 * RANKS, L * RANKS
    return (
        struct((tokens, K), np.int32),
        struct((tokens, H)),
        struct((tokens, K)),
        struct((experts, H, 2, F)),
        struct((experts, F, H)),
    )


def block(remat, activation, around):
    """A residual block, whose output the backward pass needs."""

    def f(ids, x, topk_weights, w_up, w_down):
        y, _ = jax_ep.moe_mlp(
            x,
            ids,
            topk_weights,
            w_up,
            w_down,
            axis_name="expert",
            remat=remat,
            activation=activation,
        )
        return jnp.sin(x + y)

    f = around(f)
    return jax.shard_map(f, mesh=testing.expert_mesh(), in_specs=P("expert"), out_specs=P("expert"))


def step(f):
    def run(ids, *floats):
        out, backward = jax.vjp(functools.partial(f, ids), *floats)
        return backward(out)

    return run


def counts(remat, activation, around):
    """Dispatches, redispatches, combines and forward matmuls of a training step."""
    program = lower_for_cuda(step(block(remat, activation, around)), *arguments())
    targets = program.targets
    # Matmuls by a transposed matrix are gradients.
    plain = [
        call
        for call in program.calls
        if call.target == "jax_ep.grouped_matmul.v1" and not call.attributes["transpose_rhs"][1]
    ]
    matmuls = targets["grouped_matmul_activation"] + len(plain)
    return [targets[name] for name in ("dispatch", "redispatch", "combine")] + [matmuls]


class TransfersTest(parameterized.TestCase):
    @parameterized.product(around=list(CHECKPOINTS), remat=MODES, activation=list(ACTIVATIONS))
    def test_table(self, around, remat, activation):
        table = json.loads(TABLE.read_text())
        mode = f"`{remat!r}`".replace("'", '"')
        (row,) = [row for row in table["rows"] if row[:2] == [around, mode]]
        got = counts(remat, ACTIVATIONS[activation], CHECKPOINTS[around])
        cell = row[table["columns"].index(activation)]
        self.assertEqual(", ".join(map(str, got)), cell)


class PolicyTest(parameterized.TestCase):
    def test_names_are_found_outside_of_shard_map(self):
        """The checkpoint of a model stands around its layers' shard_map."""
        for remat in MODES:
            outside = CHECKPOINTS["policy saves `REMAT_NAMES`"](block(remat, "swiglu", lambda f: f))
            program = lower_for_cuda(step(outside), *arguments())
            self.assertEqual(program.targets["dispatch"], 1, remat)
            self.assertEqual(program.targets["combine"], 2, remat)


if __name__ == "__main__":
    absltest.main()
