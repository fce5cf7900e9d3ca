"""Device memory outside JAX's pool: the workspace that was announced, at the first call, and no more ever after."""

from __future__ import annotations

import json
import sys

import testing  # isort: skip

import cuda_programs
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest
from jax.sharding import PartitionSpec as P

import jax_ep

RANKS = testing.NUM_DEVICES
TOKENS, HIDDEN, TOP_K, EXPERTS = 4096, 7168, 8, 256
CALLS = 1000


def measure():
    """Prints what one call and what many calls took on each device. The pool must have been allocated before."""
    driver = cuda_programs.Driver()
    free = lambda: np.array([driver.free_bytes(device) for device in range(RANKS)])
    f = testing.sharded(exchange, testing.expert_mesh())
    place = lambda a: jax.device_put(a, jax.NamedSharding(testing.expert_mesh(), P("expert")))
    rng = np.random.default_rng(0)
    ids = rng.integers(0, EXPERTS, (RANKS * TOKENS, TOP_K)).astype(np.int32)
    arguments = place(jnp.ones((RANKS * TOKENS, HIDDEN), jnp.bfloat16)), place(ids)
    compiled = f.lower(*arguments).compile()
    # XLA's communicator over the mesh is not jax_ep's, which only asks it for places in the mesh.
    total = testing.sharded(lambda x: jax.lax.psum(x, "expert"), testing.expert_mesh())
    jax.block_until_ready(total(arguments[0]))
    before = free()
    jax.block_until_ready(compiled(*arguments))
    first = before - free()
    for _ in range(CALLS - 1):
        result = compiled(*arguments)
    jax.block_until_ready(result)
    print(json.dumps({"first": first.tolist(), "all": (before - free()).tolist()}))


def exchange(x, ids):
    sent = jax_ep.dispatch(x, ids, None, num_experts=EXPERTS, axis_name="expert")
    return jax_ep.combine(sent.rows, sent.plan, None)


class MemoryTest(absltest.TestCase):
    def test_is_what_was_announced(self):
        memory = jax_ep.memory(TOKENS, HIDDEN, HIDDEN, EXPERTS, TOP_K, RANKS)
        announced = sum(memory.workspace.values())
        result = cuda_programs.run(
            __file__, "--child", XLA_PYTHON_CLIENT_PREALLOCATE="true", XLA_PYTHON_CLIENT_MEM_FRACTION="0.4"
        )  # fmt: skip
        taken = json.loads(result.stdout.splitlines()[-1])
        print(f"announced {announced / cuda_programs.MIB:.1f} MiB, taken {taken}")
        self.assertLessEqual(announced, 2**30)
        for first, after_all in zip(taken["first"], taken["all"], strict=True):
            self.assertLess(abs(first - announced), 32 * cuda_programs.MIB)
            self.assertLessEqual(after_all, first)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        measure()
    else:
        absltest.main()
