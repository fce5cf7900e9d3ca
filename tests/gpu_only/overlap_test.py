"""Training steps in which jax_ep, NCCL and the compiler's scheduler run side by side, with ranks late at random."""

from __future__ import annotations

import functools
import os
import pathlib
import sys
import tempfile

import testing  # isort: skip

import cuda_programs
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_ep

STEPS = int(os.environ.get("JAX_EP_TEST_STEPS", "10000"))  # all modes together
DATA, EXPERT = testing.two_axes()  # 4 GPUs: 2 * 2
MESH = testing.mesh_of((DATA, EXPERT), ("data", "expert"))
TOKENS, HIDDEN, INTERMEDIATE, TOP_K, LAYERS = 64, 128, 64, 2, 2
NUM_EXPERTS = 4 * EXPERT
BOTH = ("data", "expert")

OVERLAP = "--xla_gpu_enable_latency_hiding_scheduler=true"
ONE_AFTER_ANOTHER = (
    "--xla_gpu_enable_latency_hiding_scheduler=false --xla_gpu_disable_async_collectives="
    "ALLREDUCE,ALLGATHER,REDUCESCATTER,ALLTOALL,COLLECTIVEPERMUTE,COLLECTIVEBROADCAST"
)
NO_GRAPHS = "--xla_gpu_enable_command_buffer="
MODES = {
    "scheduler_and_graphs": f"{OVERLAP} --xla_gpu_graph_min_graph_size=1",
    "scheduler": f"{OVERLAP} {NO_GRAPHS}",
    "graphs": "--xla_gpu_graph_min_graph_size=1",
    "neither": NO_GRAPHS,
}


def initial_parameters():
    """Matrices of all experts and layers, split over "expert" by expert and over "data" by hidden size (FSDP)."""
    rng = np.random.default_rng(0)
    up = rng.standard_normal((NUM_EXPERTS, LAYERS, HIDDEN, 2, INTERMEDIATE)) / HIDDEN**0.5
    down = rng.standard_normal((NUM_EXPERTS, LAYERS, INTERMEDIATE, HIDDEN)) / INTERMEDIATE**0.5
    return up.astype(np.float32), down.astype(np.float32)


PARAMETER_SPECS = P("expert", None, "data"), P("expert", None, "data")


def loss_of_rank(parameters, x, ids):
    """FSDP: matrices are gathered over "data" for each layer; their gradients are reduce-scattered."""
    for layer in range(LAYERS):
        up, down = (lax.all_gather(p[:, layer], "data", axis=1, tiled=True) for p in parameters)
        weights = jnp.full(ids.shape, 1 / TOP_K)
        y, _ = jax_ep.moe_mlp(x, ids, weights, up, down, axis_name="expert")
        x = x + y
    return jnp.mean(x**2)


@functools.partial(jax.jit, donate_argnums=0)
def train_step(parameters, statistics, step):
    """New parameters, the loss, and the sum of something that has nothing to do with either."""

    @functools.partial(
        jax.shard_map,
        mesh=MESH,
        in_specs=(PARAMETER_SPECS, P(BOTH), P()),
        out_specs=(PARAMETER_SPECS, P(BOTH), P()),
    )
    def run(parameters, statistics, step):
        key = jax.random.fold_in(jax.random.key(step), lax.axis_index(BOTH))
        # Routes do not depend on the parameters: a last bit does not change them.
        scores = jax.random.uniform(key, (TOKENS, NUM_EXPERTS))
        ids = lax.top_k(scores, TOP_K)[1].astype(jnp.int32)
        x = jax.random.normal(key, (TOKENS, HIDDEN))
        loss, gradients = jax.value_and_grad(loss_of_rank)(parameters, x, ids)
        update = lambda p, g: p - 0.5 * g
        parameters = jax.tree.map(update, parameters, gradients)
        return parameters, lax.psum(statistics, BOTH)[None], lax.pmean(loss, BOTH)

    return run(parameters, statistics, step)


def train(steps: int) -> np.ndarray:
    """The losses."""
    place = lambda a, spec: jax.device_put(a, jax.NamedSharding(MESH, spec))
    parameters = jax.tree.map(place, initial_parameters(), PARAMETER_SPECS)
    statistics = place(np.ones((DATA * EXPERT, 2**20), np.float32), P(BOTH))
    losses = []
    for step in range(steps):
        parameters, sums, loss = train_step(parameters, statistics, jnp.int32(step))
        losses.append(loss)
        if step % 64 == 0:
            jax.block_until_ready(loss)  # otherwise thousands of steps wait in a queue
    np.testing.assert_array_equal(sums, np.full_like(sums, DATA * EXPERT))
    jax_ep.check()
    return np.array(losses)


class OverlapTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.steps = -(-STEPS // len(MODES))
        cls.expected = cls.losses(f"{ONE_AFTER_ANOTHER} {NO_GRAPHS}")

    @classmethod
    def losses(cls, flags: str, **environment: str) -> np.ndarray:
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/losses.npy"
            cuda_programs.run(
                __file__, "--child", str(cls.steps), path, flags=flags, timeout=500, **environment
            )
            return np.load(path)

    def test_training_goes_down(self):
        tenth = max(1, self.steps // 10)
        self.assertLess(self.expected[-tenth:].mean(), self.expected[:tenth].mean())

    @parameterized.parameters(*MODES)
    def test_losses_are_those_without_overlap(self, mode):
        losses = self.losses(MODES[mode], JAX_EP_TEST_DELAY_US="50")
        same = np.mean(losses == self.expected)
        print(f"{mode}: {self.steps} steps, {same:.1%} of the losses equal in all bits")
        np.testing.assert_allclose(losses, self.expected, rtol=1e-4)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        np.save(pathlib.Path(sys.argv[3]), train(int(sys.argv[2])))
    else:
        absltest.main()
