"""The operands of lax.ragged_all_to_all that say what goes where, made with numpy beforehand."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class RaggedOperands(NamedTuple):
    """int32[R, R * updates] each: row r is what rank r gives.

    Entry p * updates + u is the u-th piece that is sent to rank p, or for `recv_sizes` received
    from it. Output offsets are those at the receiver.
    """

    input_offsets: np.ndarray
    send_sizes: np.ndarray
    output_offsets: np.ndarray
    recv_sizes: np.ndarray


def ragged_operands(counts: np.ndarray, updates: int) -> RaggedOperands:
    """All rows, which lie by destination where they are sent and by source where they arrive.

    Args:
      counts: int[R, R], the rows that a rank (first) sends to another (second).
      updates: the pieces, nearly equal, into which the rows for one peer are cut.
    """
    num_ranks = len(counts)
    cuts = counts[..., None] * np.arange(updates + 1) // updates  # [R, R, updates + 1]
    starts, sizes = cuts[..., :-1], np.diff(cuts)
    in_sender = np.cumsum(counts, axis=1) - counts
    in_receiver = np.cumsum(counts, axis=0) - counts

    def rows(array: np.ndarray) -> np.ndarray:
        return array.reshape(num_ranks, -1).astype(np.int32)

    return RaggedOperands(
        input_offsets=rows(in_sender[..., None] + starts),
        send_sizes=rows(sizes),
        output_offsets=rows(in_receiver[..., None] + starts),
        recv_sizes=rows(sizes.swapaxes(0, 1)),
    )
