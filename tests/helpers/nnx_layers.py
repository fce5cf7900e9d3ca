"""nnx.MoE on meshes of every kind of axis."""

from __future__ import annotations

from typing import Any

import testing  # isort: skip

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType

from jax_ep.nnx import MoE

HIDDEN, INTERMEDIATE, NUM_EXPERTS, TOP_K = 32, 24, 8, 2
BATCH = 16

# The axes for 8 devices; `testing.fit` makes them smaller where there are fewer.
MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...], dict[str, Any]]] = {
    "expert": ((8,), ("expert",), {}),
    "data_expert": ((2, 4), ("data", "expert"), {}),
    "data_expert_small": ((4, 2), ("data", "expert"), {}),
    "fsdp": ((4, 2), ("expert", "fsdp"), {"fsdp_axis": "fsdp"}),
    "tensor": ((4, 2), ("expert", "tensor"), {"tensor_axis": "tensor"}),
    "all": (
        (2, 2, 2), ("data", "expert", "tensor"), {"fsdp_axis": "data", "tensor_axis": "tensor"},
    ),
    "bystander": ((2, 2, 2), ("data", "model", "expert"), {}),
    "two_axes": ((2, 4), ("data", "expert"), {"expert_axis": ("data", "expert")}),
    "no_expert_axis": ((8,), ("data",), {"fsdp_axis": "data", "expert_axis": None}),
}  # fmt: skip


def make_mesh(name: str, kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    shape, names, _ = MESHES[name]
    return testing.mesh_of(testing.fit(shape), names, axis_type=kind)


def one_device() -> jax.sharding.Mesh:
    return testing.mesh_of((1,), ("expert",))


def make_layer(**options: Any) -> MoE:
    options = {"rngs": nnx.Rngs(0)} | options
    return MoE(HIDDEN, INTERMEDIATE, NUM_EXPERTS, TOP_K, **options)


def tokens(seed: int = 1, batch: int = BATCH) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (batch, 5, HIDDEN))


def assert_close(got: Any, expected: Any, rtol: float = 2e-5) -> None:
    def check(path: Any, a: Any, b: Any) -> None:
        scale = np.abs(np.asarray(b, np.float32)).max()
        np.testing.assert_allclose(
            a, b, rtol=rtol, atol=rtol * scale, err_msg=jax.tree_util.keystr(path)
        )

    jax.tree_util.tree_map_with_path(check, got, expected)
