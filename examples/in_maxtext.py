"""Runs the experts of MaxText by jax_ep: an assignment before MaxText builds its model.

    import in_maxtext

    in_maxtext.install()  # then train with sparse_matmul=True

Configurations, names of parameters, logical axes and checkpoints stay MaxText's. As a program, this
trains one expert block for ten steps by MaxText's dense path and by jax_ep, on four CPU devices,
and compares the losses. It was written for maxtext 0.2.5.
"""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import maxtext
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from maxtext.configs import pyconfig
from maxtext.layers import initializers, moe
from maxtext.utils import maxtext_utils

import jax_ep

BATCH_AXES = ("data", "fsdp", "expert")  # shard the batch
SETTINGS = {
    "enable_checkpointing": False,
    "skip_jax_distributed_system": True,
    "hardware": "cpu",
    "dtype": "float32",
    "weight_dtype": "float32",
    "matmul_precision": "highest",
    "decoder_block": "mixtral",
    "base_emb_dim": 32,
    "base_mlp_dim": 48,
    "base_moe_mlp_dim": 48,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "capacity_factor": -1,
    "load_balance_loss_weight": 0.01,
    "ici_fsdp_parallelism": 2,
    "ici_expert_parallelism": 2,
}
TOLERANCE = 1e-5  # sums have another order


def install() -> None:
    """Lets `RoutedMoE` with sparse_matmul=True compute its experts by `jax_ep.moe_mlp`."""
    moe.RoutedMoE.sparse_matmul = sparse_matmul


def sparse_matmul(
    self: Any,
    inputs: jax.Array,
    gate_logits: jax.Array,
    pre_bias_logits: jax.Array | None,
    wi_0: jax.Array,
    wi_1: jax.Array,
    wo: jax.Array,
    *biases: jax.Array | None,
    **routing: Any,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Routes as MaxText does in training, then dispatches, computes and combines.

    The arguments are those of MaxText's method of this name: `inputs` is [B, S, H], logits are
    [B, S, E], wi_0 and wi_1 [E, H, F], wo [E, F, H]; biases are those of the three.

    Returns:
      [B, S, H], the loss of the balance, and the update of the router's bias.
    """
    config = self.config
    weights, ids = self.get_topk(gate_logits, pre_bias_logits, self.rngs, **routing)
    loss = update = None
    if config.load_balance_loss_weight > 0:
        scores = jax.nn.softmax(gate_logits.astype(jnp.float32)).astype(self.dtype)
        loss = self.load_balance_loss(ids, scores)
    if self.should_update_load_balance():
        rate = config.routed_bias_update_rate
        update = moe.calculate_load_balance_updates(ids, config.num_experts, rate)
    b_up, b_down = (biases[:2], biases[2]) if config.mlp_bias else (None, None)
    tokens, experts = P(BATCH_AXES), P("expert")
    specs = (tokens, tokens, tokens, experts, experts, experts, experts)

    @functools.partial(jax.shard_map, mesh=self.mesh, in_specs=specs, out_specs=tokens)
    def run(
        x: jax.Array,
        ids: jax.Array,
        weights: jax.Array,
        w_up: Any,
        w_down: Any,
        b_up: Any,
        b_down: Any,
    ) -> jax.Array:
        y, _ = jax_ep.moe_mlp(
            x.reshape(-1, x.shape[-1]),
            ids.reshape(-1, ids.shape[-1]),
            weights.reshape(-1, ids.shape[-1]),
            w_up,
            w_down,
            b_up=b_up,
            b_down=b_down,
            axis_name="expert",
            num_experts=config.num_experts,
            activation=self.apply_ffn_activation,
        )
        return y.reshape(x.shape)

    return run(inputs, ids, weights, (wi_0, wi_1), wo, b_up, b_down), loss, update


def losses(*, sparse: bool, steps: int = 10) -> list[float]:
    """Trains an expert block of MaxText on random numbers, by Adam."""
    base = pathlib.Path(maxtext.__file__).parent / "configs" / "base.yml"
    settings = SETTINGS | {"sparse_matmul": sparse, "run_name": "in_maxtext"}
    config = pyconfig.initialize(["", str(base), *(f"{k}={v}" for k, v in settings.items())])
    mesh = Mesh(maxtext_utils.create_device_mesh(config), config.mesh_axes)
    x, target = np.random.default_rng(0).standard_normal((2, 4, 16, config.emb_dim), np.float32)

    def loss_of(block: moe.RoutedMoE) -> jax.Array:
        y, balance, _ = block(x)
        return ((y - target) ** 2).mean() + balance

    @nnx.jit
    def step(block: moe.RoutedMoE, optimizer: Any) -> jax.Array:
        loss, gradients = nnx.value_and_grad(loss_of)(block)
        optimizer.update(block, gradients)
        return loss

    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        block = moe.RoutedMoE(
            config=config,
            num_experts=config.num_experts,
            num_experts_per_tok=config.num_experts_per_tok,
            mesh=mesh,
            kernel_init=initializers.nd_dense_init(1.0, "fan_in", "truncated_normal"),
            kernel_axes=("embed", None),
            intermediate_dim=config.moe_mlp_dim,
            dtype=jnp.float32,
            weight_dtype=jnp.float32,
            rngs=nnx.Rngs(0),
        )
        optimizer = nnx.Optimizer(block, optax.adam(1e-2), wrt=nnx.Param)
        return [float(step(block, optimizer)) for _ in range(steps)]


def main() -> None:
    """Compares the losses of both ways."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    install()
    dense, sparse = losses(sparse=False), losses(sparse=True)
    for i, (a, b) in enumerate(zip(dense, sparse, strict=True), 1):
        print(f"step {i:2}   MaxText {a:.7f}   jax_ep {b:.7f}")
    np.testing.assert_allclose(sparse, dense, rtol=TOLERANCE)
    print("the losses agree")


if __name__ == "__main__":
    main()
