"""The static parameters of moe_mlp, hashed by value."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jax_ep._src.core.errors import ArgumentError
from jax_ep._src.core.runtime import num_sms
from jax_ep._src.matmul.accumulation import Accumulation
from jax_ep._src.mlp.params import GroupedMlpParams
from jax_ep._src.quant.recipe import Recipe, WeightsOnly
from jax_ep._src.transfer.params import TransferParams

Remat = Literal["dispatch", "experts"] | None
"""What `moe_mlp` repeats in the backward pass rather than keeps."""

TRANSFER_SMS = 16
"""Of each transfer in flight, if num_comm_sms is not given."""

DISPATCH_LANE, COMBINE_LANE = 1, 2


@dataclasses.dataclass(frozen=True)
class MoeMlpParams:
    """Parameters of moe_mlp: those of its transfers, and those of its experts.

    Attributes:
      transfer: of the transfers.
      mlp: of the experts.
      weights_on_input: whether the routing weights multiply rows, not results.
      is_in_flight: whether the backward pass of remat="dispatch" has transfers in flight.
    """

    transfer: TransferParams
    mlp: GroupedMlpParams
    weights_on_input: bool = False
    is_in_flight: bool = False

    @property
    def sends_quantized_rows(self) -> bool:
        """Whether dispatch sends tokens quantized."""
        recipe = self.mlp.quantization
        return recipe is not None and recipe.quantized_dispatch

    @property
    def sends_quantized_cotangents(self) -> bool:
        """Whether the backward pass sends the cotangents of combine's result quantized."""
        recipe = self.mlp.quantization
        return recipe is not None and recipe.quantized_cotangents

    def in_flight(self, lane: int) -> TransferParams:
        """Returns the parameters of a transfer in flight."""
        transfer = dataclasses.replace(self.transfer, num_sms=self._sms_in_flight)
        return transfer.in_flight(lane)

    def beside(self, num_transfers: int) -> MoeMlpParams:
        """Returns those of experts beside transfers: on all SMs they would keep these out."""
        total = num_sms()
        if not total or not num_transfers:
            return self
        num_sms_left = max(1, total - num_transfers * self._sms_in_flight)
        mlp = dataclasses.replace(self.mlp, num_sms=num_sms_left)
        return dataclasses.replace(self, mlp=mlp)

    @property
    def _sms_in_flight(self) -> int:
        return self.transfer.num_sms or TRANSFER_SMS

    def accumulating(self, accumulation: Accumulation) -> MoeMlpParams:
        """Returns the parameters of one call of a chain."""
        return dataclasses.replace(
            self, mlp=dataclasses.replace(self.mlp, accumulation=accumulation)
        )


def check_weights_on_input(operation: str, quantization: Recipe | WeightsOnly | None) -> None:
    """Raises if rows are quantized before they can be multiplied by their weights."""
    if isinstance(quantization, Recipe) and quantization.quantized_dispatch:
        raise ArgumentError(
            f"jax_ep.{operation}: weights_on_input is given with quantized_dispatch=True, which "
            "quantizes rows before their weights multiply them; expected one of them. Leave "
            "quantized_dispatch out of the recipe."
        )
