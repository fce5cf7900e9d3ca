"""Failures on GPUs: a rank that never makes a call, and a device without memory for a workspace."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import unittest.mock

import testing  # isort: skip

import cuda_programs
import jax
import jax.numpy as jnp
import numpy as np
import tier
from absl.testing import absltest, parameterized
from jax.sharding import PartitionSpec as P
from testing import Sizes

import jax_ep

RANKS = testing.NUM_DEVICES
SIZES = Sizes(RANKS, num_local=2, num_tokens=16, top_k=4, hidden=64)
WAITED = r"jax_ep: rank (\d+) waited for rank (\d+) in (\w+\.\w+) \(sequence number (\d+)\) until the deadline"


@contextlib.contextmanager
def absent(device: int):
    """One device makes no call, as if its program had none, or its process had died before it."""
    with unittest.mock.patch.dict(os.environ, JAX_EP_TEST_ABSENT_DEVICE=str(device)):
        yield


def by_rank(values):
    """The shards of an array as numpy, whether others can be read or not."""
    shards = sorted(values.addressable_shards, key=lambda shard: shard.index[0].start or 0)
    return [np.asarray(shard.data) for shard in shards]


class Layer:
    """dispatch and combine, compiled; right results are known."""

    def __init__(self):
        self.run = testing.sharded(self.f, SIZES.mesh)
        self.ids = testing.merge_ranks(testing.routings(SIZES)["half"])
        self.x = np.ones((len(self.ids), SIZES.hidden), np.float32)
        counts = (self.ids >= 0).sum(1, keepdims=True)
        self.expected = np.repeat(counts, SIZES.hidden, 1).astype(np.float32)

    @staticmethod
    def f(x, ids):
        sent = SIZES.dispatch(x, ids, None)
        out = jax_ep.combine(sent.rows, sent.plan, None)
        return out, sent.rows, sent.group_sizes, sent.plan.status

    def __call__(self):
        return jax.block_until_ready(self.run(self.x, self.ids))

    def check(self):
        out, _, _, status = self()
        testing.assert_bitwise(out, self.expected)
        assert not np.asarray(status).any()


def a_rank_never_enters(missing: int):
    """In a process of its own, with short deadlines."""
    layer = Layer()
    for _ in range(3):
        layer.check()
    with absent(missing):
        results = layer()
    others = [rank for rank in range(RANKS) if rank != missing]
    out, rows, group_sizes, status = (by_rank(result) for result in results)
    for rank in others:
        assert np.isnan(out[rank]).all() and np.isnan(rows[rank]).all(), f"rank {rank} is not NaN"
        assert not group_sizes[rank].any(), f"rank {rank} has sizes {group_sizes[rank]}"
        assert status[rank][0] != 0, f"rank {rank} has status 0"

    try:
        layer()
    except jax.errors.JaxRuntimeError as error:
        found = re.search(WAITED, str(error))
        assert found, f"another error: {error}"
        waiting, peer, phase, _ = found.groups()
    else:
        raise AssertionError("the call after a deadline raised nothing")
    assert int(waiting) in others and int(peer) == missing and phase == "dispatch.entry", found[0]

    try:
        jax_ep.check()
    except jax_ep.PeerTimeoutError as error:
        assert error.rank in others and error.peer == missing, error
        assert error.phase == "dispatch.entry" and error.sequence_number > 0, error
    else:
        raise AssertionError("jax_ep.check() raised nothing")

    assert jax_ep.release() > 0
    jax_ep.check()
    for _ in range(5):
        layer.check()


def a_device_is_full(full: int):
    """The workspace does not fit on one device: every device says so, and later the same call is right."""
    sizes = Sizes(RANKS, num_local=1, num_tokens=65536, top_k=2, hidden=2048, recv_capacity=8)

    def f(x, ids):
        sent = sizes.dispatch(x, ids, None)
        return jax_ep.combine(sent.rows, sent.plan, None), sent.plan.num_received

    small = Layer()
    small.check()  # kernels are loaded, communicators are made
    run = testing.sharded(f, sizes.mesh)
    place = lambda a: jax.device_put(a, jax.NamedSharding(sizes.mesh, P("expert")))
    x = place(jnp.ones((RANKS * sizes.num_tokens, sizes.hidden), jnp.bfloat16))
    ids = np.full((RANKS * sizes.num_tokens, 2), -1, np.int32)
    ids[:: sizes.num_tokens, 0] = 0  # one token of each rank, to rank 0
    ids = place(ids)
    room = place(jnp.zeros((RANKS * 2**30,), jnp.uint8))
    room.block_until_ready().delete()  # JAX's pool keeps it: what follows fails in jax_ep alone
    memory = jax_ep.memory(sizes.num_tokens, sizes.hidden, sizes.hidden, RANKS, 2, RANKS)
    needed = sum(memory.workspace.values())
    driver = cuda_programs.Driver()
    with driver.filled(full, but=64 * cuda_programs.MIB):
        for _ in range(2):
            try:
                jax.block_until_ready(run(x, ids))
            except jax.errors.JaxRuntimeError as error:
                text = str(error)
            else:
                raise AssertionError("the workspace cannot have fitted")
            assert f"jax_ep: out of memory on GPU {full}: " in text, text
            assert f" {needed} bytes" in text and "XLA_PYTHON_CLIENT_MEM_FRACTION" in text, text
    small.check()
    out, received = run(x, ids)
    np.testing.assert_array_equal(np.asarray(out[:: sizes.num_tokens, 0], np.float32), 1)
    assert int(received.sum()) == RANKS
    print(text)


CHILDREN = {f.__name__: f for f in (a_rank_never_enters, a_device_is_full)}


class FaultTest(parameterized.TestCase):
    @parameterized.parameters((0,), (RANKS - 1,))
    @tier.needs_gpus(2)
    def test_a_rank_never_enters(self, missing):
        # Replays of a captured graph do not ask who is absent.
        process = cuda_programs.run(
            __file__,
            "--child",
            "a_rank_never_enters",
            str(missing),
            flags="--xla_gpu_enable_command_buffer=",
            timeout=120,
            JAX_EP_ENTRY_TIMEOUT_S="4",
            JAX_EP_PROGRESS_TIMEOUT_S="4",
            JAX_EP_WARN_AFTER_S="1",
        )
        self.assertRegex(
            process.stderr,
            rf"jax_ep: rank \d+ has waited 1 s for rank {missing} in dispatch\.entry \(sequence number \d+\)",
        )

    def test_a_device_is_full(self):
        cuda_programs.run(__file__, "--child", "a_device_is_full", str(RANKS - 1), timeout=120)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        CHILDREN[sys.argv[2]](int(sys.argv[3]))
    else:
        absltest.main()
