"""NVLink domains: what a plan of two levels has beside one of a single level, and the checks."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from jax_ep._src.core import checks
from jax_ep._src.core.errors import ArgumentError
from jax_ep._src.core.primitive import warn_once
from jax_ep._src.quant.quantized import row_bytes
from jax_ep._src.transfer.params import TransferParams

MOST_DROPLESS_BYTES = 4 << 30
"""Rows of a dropless call over several domains, above which there is a warning."""

_BITS = 32


class Forwarding(NamedTuple):
    """Tells a rank where to forward rows inside its NVLink domain, and how to sum them there.

    D ranks per domain, R/D domains. A rank's rail partners are the ranks with its index in the
    other domains; only they send it tokens over the network.

    Attributes:
      token_ranks: uint32[R/D, T, ceil(D/32)], for each token of the rail partner in each domain,
        and of the rank itself, the ranks of this domain that got an assignment of it, a bit each.
      partial_sum_index: int32[M], as the plan's, among the ranks of this domain.
    """

    token_ranks: Any
    partial_sum_index: Any


def num_words(domain_size: int) -> int:
    """The words of 32 bits that have a bit for each rank of a domain."""
    return -(-domain_size // _BITS)


def forwarding_shapes(
    num_tokens: int, num_rows: int, num_ranks: int, domain_size: int | None
) -> tuple[tuple[tuple[int, ...], Any], ...]:
    """(shape, dtype) of each array that a plan has beside those of one level."""
    if domain_size is None:
        return ()
    num_domains = num_ranks // domain_size
    return (
        ((num_domains, num_tokens, num_words(domain_size)), jnp.uint32),
        ((num_rows,), jnp.int32),
    )


def check_domain_size(operation: str, domain_size: Any, num_ranks: int) -> int | None:
    """The ranks per NVLink domain, or None for one level, as where one domain has all ranks."""
    if domain_size is None:
        return None
    size = checks.integer(operation, "nvlink_domain_size", domain_size)
    if num_ranks % size:
        fitting = [n for n in range(1, num_ranks + 1) if num_ranks % n == 0]
        raise ArgumentError(
            f"jax_ep.{operation}: nvlink_domain_size={size}, and the expert axis has {num_ranks} "
            f"ranks; expected one of {', '.join(map(str, fitting))}, which divide them. Give the "
            "number of consecutive ranks that each host has."
        )
    return None if size == num_ranks else size


def warn_of_dropless_rows(operation: str, params: TransferParams, x: Any) -> None:
    """Warns of rows that are many because no capacity bounds them; x is the tokens."""
    num_bytes = params.num_rows * row_bytes(x)
    if params.domain_size is None or num_bytes <= MOST_DROPLESS_BYTES:
        return
    warn_once(
        f"{operation}: {params.num_rows} rows",
        f"jax_ep.{operation}: without a capacity each of {params.axis.size} ranks has room for "
        f"{params.num_rows} rows, {num_bytes / 2**30:.0f} GiB in each array of rows, as all tokens "
        "of all hosts might come to one rank. Give capacity_factor, such as 2.0, to bound them.",
    )
