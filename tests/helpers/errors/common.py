"""A mesh of all devices, arrays of its ranks, and a format, for the calls of several topics."""

from __future__ import annotations

import testing  # isort: skip

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from jax_ep import quant

MESH = testing.expert_mesh()
RANKS = testing.NUM_DEVICES
X = np.ones((4 * RANKS, 8), np.float32)
IDS = np.zeros((4 * RANKS, 2), np.int32)
WEIGHTS = np.ones((4 * RANKS, 2), np.float32)
ROW = quant.Fp8Row()


def inside(f, mesh=MESH, **options):
    """Traces f(x, ids, weights) inside shard_map."""
    specs = {"in_specs": P("expert"), "out_specs": P("expert")}
    jax.eval_shape(jax.shard_map(f, mesh=mesh, **specs, **options), X, IDS, WEIGHTS)
