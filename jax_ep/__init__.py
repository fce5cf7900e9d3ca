"""Expert-parallel mixture-of-experts operations for JAX."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jax_ep import quant, routing, typing
from jax_ep._src.core.errors import (
    ArgumentError,
    DtypeError,
    Error,
    MissingExtensionError,
    PeerTimeoutError,
    UnavailableError,
)
from jax_ep._src.core.make_mesh import make_mesh
from jax_ep._src.core.primitive import export_checks
from jax_ep._src.core.runtime import build_info, check, release
from jax_ep._src.matmul.accumulation import Accumulators, accumulators
from jax_ep._src.matmul.activations import ClampedSwiGlu
from jax_ep._src.matmul.grouped_matmul import grouped_matmul
from jax_ep._src.matmul.grouped_matmul_rhs_gradient import grouped_matmul_rhs_gradient
from jax_ep._src.matmul.groups import mask_tail
from jax_ep._src.mlp.grouped_mlp import grouped_mlp
from jax_ep._src.moe.memory import Memory, memory
from jax_ep._src.moe.moe_mlp import moe_mlp
from jax_ep._src.moe.stats import Stats
from jax_ep._src.profile.profile import Profile, profile
from jax_ep._src.serialization import register as _register_serialization
from jax_ep._src.transfer.combine import combine
from jax_ep._src.transfer.combine_start import combine_done, combine_start
from jax_ep._src.transfer.dispatch import dispatch
from jax_ep._src.transfer.dispatch_start import dispatch_done, dispatch_start
from jax_ep._src.transfer.in_flight import InFlight, overlap
from jax_ep._src.transfer.plan import REMAT_NAMES, Dispatched, Plan
from jax_ep._src.transfer.redispatch import redispatch
from jax_ep._src.transfer.tune import tune
from jax_ep._src.transfer.tuning import use_tuning

if TYPE_CHECKING:
    from jax_ep import checkpoints, linen, nnx

_register_serialization()

__version__: str = build_info()["version"]

__all__ = [
    "REMAT_NAMES",
    "Accumulators",
    "ArgumentError",
    "ClampedSwiGlu",
    "Dispatched",
    "DtypeError",
    "Error",
    "InFlight",
    "Memory",
    "MissingExtensionError",
    "PeerTimeoutError",
    "Plan",
    "Profile",
    "Stats",
    "UnavailableError",
    "accumulators",
    "build_info",
    "check",
    "checkpoints",
    "combine",
    "combine_done",
    "combine_start",
    "dispatch",
    "dispatch_done",
    "dispatch_start",
    "export_checks",
    "grouped_matmul",
    "grouped_matmul_rhs_gradient",
    "grouped_mlp",
    "linen",
    "make_mesh",
    "mask_tail",
    "memory",
    "moe_mlp",
    "nnx",
    "overlap",
    "profile",
    "quant",
    "redispatch",
    "release",
    "routing",
    "tune",
    "typing",
    "use_tuning",
]


def __getattr__(name: str) -> Any:
    if name in ("checkpoints", "linen", "nnx"):  # when first used: Flax is optional and slow
        return importlib.import_module(f"jax_ep.{name}")
    raise AttributeError(f"module 'jax_ep' has no attribute {name!r}")
