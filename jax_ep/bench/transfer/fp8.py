"""jax_ep's transfers of quantized rows, beside those of bfloat16.

The operations are those of bfloat16 with a format's name. Their bytes are those of bfloat16 rows,
so that GB/s compare. Rows are quantized before they are timed, or in the call.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jax_ep import quant
from jax_ep.bench.common.benchmark import Provider
from jax_ep.bench.common.programs import sharded
from jax_ep.bench.common.report import OURS
from jax_ep.bench.matmul import fp8 as matmul_fp8
from jax_ep.bench.matmul.fp8 import BFLOAT16
from jax_ep.bench.transfer.problem import Problem
from jax_ep.bench.transfer.providers import Ours, Transfer

FORMATS: dict[str, quant.Format] = {
    **matmul_fp8.FORMATS,
    "mxfp8": quant.MxFp8(),
    "mxfp4": quant.MxFp4(),
    "nvfp4": quant.NvFp4(),
}
TENSOR_SCALE = 6 / (448 * 6)
"""Of formats that have one: normal numbers seldom exceed 6."""

OPERATIONS: tuple[str, ...] = tuple(
    f"{operation}_{name}" for name in FORMATS for operation in ("dispatch", "redispatch")
)
IN_CALL = "jax_ep, quantized in the call"
REQUIRED = ((OURS,), (IN_CALL,), (BFLOAT16,))


class Quantized(Ours):
    """jax_ep's dispatch and redispatch of rows in a format.

    Attributes:
      quantizes: where: "before" or "in the call"; "never" sends bfloat16.
    """

    operations: tuple[str, ...] = OPERATIONS

    def __init__(self, name: str, quantizes: Literal["before", "in the call", "never"]) -> None:
        super().__init__()
        self.name = name
        self.quantizes = quantizes

    def transfers(self, problem: Problem, implementation: str | None) -> dict[str, Transfer]:
        """Returns the functions of one rank's arrays that are compiled."""
        transfers = super().transfers(problem, implementation)

        def of_rows(transfer: Transfer, format: quant.Format, x: Any, *others: Any) -> Any:
            rows = quantize(x, format) if self.quantizes == "in the call" else x
            sent = transfer(with_tensor_scale(rows), *others)
            return dataclasses.replace(sent, rows=without_tensor_scale(sent.rows))

        found: dict[str, Transfer] = {}
        for operation in OPERATIONS:
            transfer = transfers[transfer_of(operation)]
            if self.quantizes != "never":
                transfer = functools.partial(of_rows, transfer, format_of(operation))
            found[operation] = transfer
        return found

    def arguments(self, operation: str, problem: Problem) -> list[tuple[Any, ...]]:
        """Returns the operands of calls in turn."""
        found = super().arguments(transfer_of(operation), problem)
        if self.quantizes != "before":
            return found
        of_rank = functools.partial(quantize, format=format_of(operation))
        on_ranks = jax.jit(sharded(of_rank, problem.mesh))
        return [(jax.block_until_ready(on_ranks(x)), *others) for x, *others in found]


def quantize(x: jax.Array, format: quant.Format) -> quant.Quantized:
    """Quantizes rows by one scale on all ranks, where the format has one, and leaves it out."""
    scale = TENSOR_SCALE if format.has_tensor_scale else None
    return without_tensor_scale(quant.quantize(x, format, tensor_scale=scale))


def with_tensor_scale(rows: quant.Quantized) -> quant.Quantized:
    """Returns rows as `quantize` made them before it left out the scale."""
    scale = jnp.float32(TENSOR_SCALE) if rows.format.has_tensor_scale else None
    return dataclasses.replace(rows, tensor_scale=scale)


def without_tensor_scale(rows: quant.Quantized) -> quant.Quantized:
    """Returns the arrays that `shard_map` splits over the ranks."""
    return dataclasses.replace(rows, tensor_scale=None)


def transfer_of(operation: str) -> str:
    """Returns the operation without the format."""
    return operation.partition("_")[0]


def format_of(operation: str) -> quant.Format:
    """Returns the format."""
    return FORMATS[operation.partition("_")[2]]


PROVIDERS: tuple[Provider, ...] = (
    Quantized(OURS, "before"),
    Quantized(IN_CALL, "in the call"),
    Quantized(BFLOAT16, "never"),
)
