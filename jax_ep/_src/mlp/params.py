"""The static parameters of the experts, hashed by value."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from jax_ep._src.core import compat
from jax_ep._src.matmul.accumulation import Accumulation
from jax_ep._src.matmul.activations import NamedActivation
from jax_ep._src.matmul.params import GroupedMatmulActivationParams, GroupedMatmulParams
from jax_ep._src.quant.recipe import Recipe


@dataclasses.dataclass(frozen=True)
class GroupedMlpParams:
    """Parameters of grouped_mlp, and of the matmuls that it is made of."""

    activation: NamedActivation  # "none" if a function runs between the matmuls
    zero_tail: bool  # for the result and for the gradients of the rows and of their weights
    num_sms: int
    implementation: str | None
    accumulation: Accumulation = Accumulation.NONE
    quantization: Recipe | None = None
    row_dtype: Any = None  # what quantized rows were before

    def __post_init__(self) -> None:
        if compat.looks_for_nan():
            object.__setattr__(self, "zero_tail", True)

    def epilogue(self, activation: NamedActivation) -> GroupedMatmulActivationParams:
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
