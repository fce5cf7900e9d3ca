"""The static parameters of the transfers, hashed by value."""

from __future__ import annotations

import dataclasses

from jax_ep._src.core import compat
from jax_ep._src.core.expert_axis import ExpertAxis

SMS_OVER_DOMAINS = 16
"""The most SMs of a transfer in flight over NVLink domains."""

NUM_LANES = 4
"""Lane 0, of calls that nothing runs beside, and those of calls in flight."""


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
    domain_size: int | None = None  # ranks per NVLink domain; None for one level
    lane: int = 0  # calls of different lanes may run at the same time
    num_lanes: int = 1  # lanes that may be in flight; each gets a share of the SMs

    def in_flight(self, lane: int) -> TransferParams:
        """Returns those of a transfer that runs beside others.

        Those of lane 0 take every SM that is free. The others together leave some to it, so that a
        block of it is always resident, and all lanes go on. Over NVLink domains they take few,
        because they hold them while the network is what they wait for.
        """
        num_sms = self.num_sms
        if self.domain_size is not None:
            num_sms = min(num_sms or SMS_OVER_DOMAINS, SMS_OVER_DOMAINS)
        return dataclasses.replace(self, lane=lane, num_lanes=NUM_LANES, num_sms=num_sms)

    def __post_init__(self) -> None:
        if compat.looks_for_nan():
            object.__setattr__(self, "zero_tail", True)
