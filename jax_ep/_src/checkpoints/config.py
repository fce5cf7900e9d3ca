"""Entries of config.json, which have several names or are nested."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from jax_ep._src.core.errors import ArgumentError

NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def read_config(given: Mapping[str, Any] | str | pathlib.Path) -> dict[str, Any]:
    """Returns the config that is given, or that of a folder."""
    if isinstance(given, Mapping):
        return dict(given)
    path = pathlib.Path(given) / "config.json"
    if not path.exists():
        raise ArgumentError(
            f"jax_ep.checkpoints: {path} does not exist; expected the folder of a checkpoint that "
            "transformers can read. Download the whole folder."
        )
    config: dict[str, Any] = json.loads(path.read_text())
    return config


def of_text(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of the language model: nested ones go before others."""
    return {k: v for k, v in config.items() if k != "text_config"} | config.get("text_config", {})


def entry(config: Mapping[str, Any], *names: str) -> Any:
    """Returns the first of these entries that is there."""
    for name in names:
        if config.get(name) is not None:
            return config[name]
    raise ArgumentError(
        f"jax_ep.checkpoints: the config lacks {' or '.join(names)}; expected it among "
        f"{sorted(config)}. Add it to config.json."
    )


def quantization(config: Mapping[str, Any]) -> str | None:
    """Returns "fp8", "mxfp4", or None for a checkpoint of floats."""
    given = config.get("quantization_config")
    if given is None:
        return None
    method = given.get("quant_method")
    block = tuple(given.get("weight_block_size") or (128, 128))
    if method not in ("fp8", "mxfp4") or block != (128, 128):
        raise ArgumentError(
            f"jax_ep.checkpoints: the checkpoint is quantized by {method!r} with blocks of "
            f"{block}; expected 'fp8' with blocks of (128, 128), or 'mxfp4'. Convert it to "
            "bfloat16 with transformers first."
        )
    return str(method)
