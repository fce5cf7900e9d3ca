"""Writes docs/data/network.json: the least times of dispatch and combine over hosts."""

from __future__ import annotations

import json
import math
import pathlib
from typing import Any

PATH = pathlib.Path(__file__).resolve().parents[2] / "docs" / "data" / "network.json"
DOMAIN_SIZE, NETWORK_GB_S, NVLINK_GB_S = 8, 50, 336
TOKENS, HIDDEN, NUM_EXPERTS, TOP_K = 4096, 7168, 256, 8
BYTES = {"bfloat16": 2 * HIDDEN, "FP8 rows": HIDDEN + 4 * HIDDEN // 128}


def hit(experts: int) -> float:
    """Returns how probable it is that a token has one of so many given experts."""
    others = NUM_EXPERTS - experts
    return 1 - math.comb(others, TOP_K) / math.comb(NUM_EXPERTS, TOP_K)


def remote_domains(num_domains: int) -> float:
    """Returns to how many other domains a token is sent, on average."""
    return (num_domains - 1) * hit(NUM_EXPERTS // num_domains)


def milliseconds(num_domains: int, row_bytes: int) -> float:
    """Returns the time of a rank's rows over its NIC, to each host once."""
    return TOKENS * remote_domains(num_domains) * row_bytes / (NETWORK_GB_S * 1e6)


def nvlink_milliseconds(num_domains: int, row_bytes: int) -> float:
    """Returns the time of the rows inside a host, but for the GPUs that they reach first."""
    num_ranks = num_domains * DOMAIN_SIZE
    rows = TOKENS * num_ranks * hit(NUM_EXPERTS // num_ranks) * (DOMAIN_SIZE - 1) / DOMAIN_SIZE
    return rows * row_bytes / (NVLINK_GB_S * 1e6)


def table() -> dict[str, Any]:
    """Returns the table as docs/data holds it."""
    rows = []
    for num_domains in 2, 4, 8, 16, 32:
        wide, narrow = (milliseconds(num_domains, b) for b in BYTES.values())
        inside = nvlink_milliseconds(num_domains, BYTES["bfloat16"])
        rows.append(
            [
                f"{num_domains} x {DOMAIN_SIZE}",
                f"{remote_domains(num_domains):.2f}",
                f"{wide * NETWORK_GB_S:.0f}",
                f"{wide:.2f}",
                f"{narrow:.2f}",
                f"{inside:.2f}",
            ]
        )
    return {
        "caption": f"Least times of a dispatch or a combine, {TOKENS} tokens per rank, "
        f"H = {HIDDEN}, {TOP_K} of {NUM_EXPERTS} experts, uniform routing",
        "device": "any: computed by tools/docs/network_table.py",
        "columns": [
            "hosts x GPUs",
            "other hosts per token",
            "MB over each NIC",
            f"ms at {NETWORK_GB_S} GB/s",
            "with FP8 rows",
            f"inside a host, ms at {NVLINK_GB_S} GB/s",
        ],
        "rows": rows,
    }


if __name__ == "__main__":
    PATH.write_text(json.dumps(table(), indent=2) + "\n")
