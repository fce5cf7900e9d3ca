"""The static parameters of the transfers, hashed by value."""

from __future__ import annotations

import dataclasses

from jax_ep._src.core import compat
from jax_ep._src.core.expert_axis import ExpertAxis


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

    def __post_init__(self) -> None:
        if compat.looks_for_nan():
            object.__setattr__(self, "zero_tail", True)
