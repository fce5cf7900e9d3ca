"""Writes docs/data/memory.json: what a layer of five models keeps, by `jax_ep.memory`."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jax_ep

PATH = pathlib.Path(__file__).resolve().parents[2] / "docs" / "data" / "memory.json"
TOKENS = 4096
# Hidden size, intermediate size, experts, top-k, ranks.
MODELS = {
    "Mixtral-8x7B": (4096, 14336, 8, 2, 8),
    "Qwen3-30B-A3B": (2048, 768, 128, 8, 8),
    "Qwen3-235B-A22B": (4096, 1536, 128, 8, 8),
    "DeepSeek-V3": (7168, 2048, 256, 8, 64),
    "gpt-oss-120b": (2880, 2880, 128, 4, 8),
}


def table() -> dict[str, Any]:
    """Returns the table as docs/data holds it."""
    rows = []
    for name, (hidden, intermediate, num_experts, top_k, num_ranks) in MODELS.items():
        for factor in None, 1.25:
            options = {
                remat: jax_ep.memory(
                    TOKENS,
                    hidden,
                    intermediate,
                    num_experts,
                    top_k,
                    num_ranks,
                    capacity_factor=factor,
                    remat=remat,
                )
                for remat in (None, "dispatch", "experts")
            }
            any_of_them = options[None]
            rows.append(
                [
                    f"{name}, {num_ranks} ranks",
                    "dropless" if factor is None else str(factor),
                    str(any_of_them.num_rows),
                    *(f"{sum(m.residuals.values()) / 2**30:.2f}" for m in options.values()),
                    f"{sum(any_of_them.workspace.values()) / 2**30:.2f}",
                ]
            )
    return {
        "caption": f"GiB per layer and rank, bfloat16, {TOKENS} tokens per rank",
        "device": "any: computed by jax_ep.memory",
        "columns": [
            "model",
            "capacity factor",
            "rows",
            "`None`",
            '`"dispatch"`',
            '`"experts"`',
            "workspace",
        ],
        "rows": rows,
    }


if __name__ == "__main__":
    PATH.write_text(json.dumps(table(), indent=2) + "\n")
