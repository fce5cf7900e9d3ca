"""The static parameters of the primitives and of the layers made of them, hashed by value.

``num_sms`` is 0 where the launch code chooses. ``implementation`` is "cuda", "xla", or None to
choose while lowering.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp

from jax_ep._src.accumulation import Accumulation
from jax_ep._src.mesh import ExpertAxis
from jax_ep._src.recipe import Recipe

Remat = Literal["dispatch", "experts"] | None
"""What `moe_mlp` repeats in the backward pass rather than keeps."""


@dataclasses.dataclass(frozen=True)
class TransferParams:
    """Parameters of dispatch, redispatch and combine."""

    axis: ExpertAxis
    num_experts: int
    num_rows: int
    row_align: int
    zero_tail: bool
    num_sms: int
    implementation: str | None
    lane: int = 0  # calls of different lanes may run at the same time
    num_lanes: int = 1  # lanes that may be in flight; each gets a share of the SMs


@dataclasses.dataclass(frozen=True)
class GroupedMatmulParams:
    """Parameters of grouped_matmul and grouped_matmul_rhs_gradient."""

    transpose_rhs: bool
    out_dtype: Any
    zero_tail: bool
    num_sms: int
    implementation: str | None


@dataclasses.dataclass(frozen=True)
class GroupedMatmulActivationParams:
    """Parameters of grouped_matmul_activation and grouped_matmul_activation_gradient."""

    activation: str  # its name, or "none"
    num_sms: int
    implementation: str | None


@dataclasses.dataclass(frozen=True)
class GroupedMlpParams:
    """Parameters of grouped_mlp, and of the matmuls that it is made of."""

    activation: str  # its name; "none" if a function runs between the matmuls
    zero_tail: bool  # for the result and for the gradients of the rows and of their weights
    num_sms: int
    implementation: str | None
    accumulation: Accumulation = Accumulation.NONE
    quantization: Recipe | None = None
    row_dtype: Any = None  # what quantized rows were before

    def epilogue(self, activation: str) -> GroupedMatmulActivationParams:
        """Returns the parameters of a matmul with that activation in its epilogue."""
        return GroupedMatmulActivationParams(activation, self.num_sms, self.implementation)

    def matmul(
        self, out_dtype: Any, *, transpose_rhs: bool = False, zero_tail: bool = False
    ) -> GroupedMatmulParams:
        """Returns the parameters of a plain matmul."""
        return GroupedMatmulParams(
            transpose_rhs=transpose_rhs,
            out_dtype=jnp.dtype(out_dtype),
            zero_tail=zero_tail,
            num_sms=self.num_sms,
            implementation=self.implementation,
        )


@dataclasses.dataclass(frozen=True)
class MoeMlpParams:
    """Parameters of moe_mlp: those of its transfers as given, and those of its experts."""

    num_experts: int
    axis: ExpertAxis
    recv_capacity: int | None
    capacity_factor: float | None
    num_comm_sms: int | None
    implementation: str | None
    zero_tail: bool
    mlp: GroupedMlpParams

    def accumulating(self, accumulation: Accumulation) -> MoeMlpParams:
        """Returns the parameters of one call of a chain."""
        return dataclasses.replace(
            self, mlp=dataclasses.replace(self.mlp, accumulation=accumulation)
        )
