"""The three operations by hand: dispatch, grouped_matmul, combine, inside one shard_map."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jax_ep

NUM_EXPERTS, TOP_K = 16, 2


def moe(x: jax.Array, logits: jax.Array, w_up: jax.Array, w_down: jax.Array) -> jax.Array:
    """One rank's part: its tokens [T, H] and its experts [L, ...]."""
    chosen = jax_ep.routing.softmax_topk(logits, TOP_K)
    sent = jax_ep.dispatch(
        x, chosen.topk_ids, chosen.topk_weights, num_experts=NUM_EXPERTS, axis_name="expert"
    )
    activations = jax.nn.relu(jax_ep.grouped_matmul(sent.rows, w_up, sent.group_sizes))
    y = jax_ep.grouped_matmul(activations, w_down, sent.group_sizes)
    return jax_ep.combine(y, sent.plan, sent.row_weights)


def dense(x: jax.Array, logits: jax.Array, w_up: jax.Array, w_down: jax.Array) -> jax.Array:
    """The same sum without dispatch: every expert on every token."""
    chosen = jax_ep.routing.softmax_topk(logits, TOP_K)
    weights = (jax.nn.one_hot(chosen.topk_ids, NUM_EXPERTS) * chosen.topk_weights[..., None]).sum(1)
    hidden = jax.nn.relu(jnp.einsum("th,ehf->tef", x, w_up))
    return jnp.einsum("tef,efh,te->th", hidden, w_down, weights)


jax.config.update("jax_num_cpu_devices", 8)  # where there is no GPU
jax.config.update("jax_default_matmul_precision", "highest")  # GPUs round to TF32 otherwise
mesh = jax_ep.make_mesh((jax.device_count(),), ("expert",))
shapes = [(64, 32), (64, NUM_EXPERTS), (NUM_EXPERTS, 32, 48), (NUM_EXPERTS, 48, 32)]
arguments = [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)]
sharded_moe = jax.shard_map(moe, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))
expected = jax.jit(dense)(*arguments)
y = jax.jit(sharded_moe)(*jax.device_put(arguments, jax.NamedSharding(mesh, P("expert"))))
error = abs(y - expected).max() / abs(expected).max()
print(f"64 tokens, {TOP_K} of {NUM_EXPERTS} experts each, over {jax.device_count()} devices")
print(f"largest difference to dense experts, relative to the largest value: {error:.1e}")
assert error < 1e-5
