"""The static parameters of the grouped matmuls, hashed by value.

``num_sms`` is 0 where the launch code chooses. ``implementation`` is "cuda", "xla", or None to
choose while lowering.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jax_ep._src.core import compat
from jax_ep._src.matmul.activations import NamedActivation


@dataclasses.dataclass(frozen=True)
class GroupedMatmulParams:
    """Parameters of grouped_matmul and grouped_matmul_rhs_gradient."""

    transpose_rhs: bool
    out_dtype: Any
    zero_tail: bool
    num_sms: int
    implementation: str | None

    def __post_init__(self) -> None:
        if compat.looks_for_nan():
            object.__setattr__(self, "zero_tail", True)


@dataclasses.dataclass(frozen=True)
class GroupedMatmulActivationParams:
    """Parameters of grouped_matmul_activation and grouped_matmul_activation_gradient."""

    activation: NamedActivation  # or "none"
    num_sms: int
    implementation: str | None
    zero_tail: bool = dataclasses.field(default_factory=compat.looks_for_nan)  # in pure JAX only
