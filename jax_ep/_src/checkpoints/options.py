"""The options of a layer from a checkpoint's config.json."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jax_ep._src.checkpoints.config import NUM_EXPERTS, entry, of_text, quantization, read_config
from jax_ep._src.checkpoints.families import FAMILIES, Family
from jax_ep._src.core.errors import ArgumentError
from jax_ep._src.quant.formats import BLOCK, Format, Fp8Block128
from jax_ep._src.quant.microscaling import MxFp4
from jax_ep._src.quant.recipe import Recipe, WeightsOnly


def family_of(config: Mapping[str, Any]) -> Family:
    """Returns the family by the config's ``architectures``."""
    given = config.get("architectures") or [None]
    if given[0] not in FAMILIES:
        raise ArgumentError(
            f"jax_ep.checkpoints: the architecture {given[0]!r} is not known; expected one of "
            f"{tuple(FAMILIES)}. If yours has the names and layouts of one of these, give the "
            "config with that name in 'architectures'."
        )
    return FAMILIES[given[0]]


def moe_options(
    config: Mapping[str, Any] | str | pathlib.Path, *, dequantize: bool = False
) -> dict[str, Any]:
    """Returns the options of `jax_ep.nnx.MoE` and `jax_ep.linen.MoE` for a checkpoint.

    They are sizes, routing (as in ``router``, ``selection_bias``), shared experts, ``activation``,
    biases and ``param_dtype``, and ``quantization`` for experts that stay in eight or four bits.
    Options of the mesh are yours::

        layer = jax_ep.nnx.MoE(**checkpoints.moe_options(folder), mesh=mesh, rngs=nnx.Rngs(0))

    Args:
      config: the entries of config.json, or the checkpoint's folder.
      dequantize: as for `load`.

    Returns:
      A new dict, which you may change, for example its ``param_dtype``.

    Raises:
      ArgumentError (a ValueError): an architecture that is not known, a config without a size, or
        an activation or a quantization that layers do not have.
    """
    whole = read_config(config)
    family, text = family_of(whole), of_text(whole)
    activation = text.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ArgumentError(
            f"jax_ep.checkpoints: hidden_act={activation!r} in the config; expected 'silu'. Give "
            "moe_options a config with 'silu', and the layer an activation= of your own."
        )
    options: dict[str, Any] = {
        "hidden_size": entry(text, "hidden_size"),
        "intermediate_size": entry(text, *family.size),
        "num_experts": entry(text, *NUM_EXPERTS),
        "top_k": entry(text, "num_experts_per_tok"),
    }
    dtype = text.get("dtype") or text.get("torch_dtype")
    if dtype is not None:
        options["param_dtype"] = jnp.dtype(dtype)
    options |= family.routing(text)
    kept = kept_format(whole, dequantize)
    if kept is not None:
        recipe = Recipe() if kept == Fp8Block128() else WeightsOnly(kept)
        options |= {"quantization": recipe, "quantized_only": True}
    return options


def kept_format(config: Mapping[str, Any], dequantize: bool) -> Format | None:
    """Returns the format in which experts stay quantized, or None if they become floats.

    Gate and up are joined, so blocks of 128 x 128 have to end where the gate does.
    """
    packing = None if dequantize else quantization(config)
    if packing == "mxfp4":
        return MxFp4()
    if packing == "fp8" and not entry(of_text(config), *family_of(config).size) % BLOCK:
        return Fp8Block128()
    return None


def moe_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the indices of the layers that have experts."""
    family, text = family_of(config), of_text(config)
    count = entry(text, "num_hidden_layers")
    return tuple(i for i in range(count) if family.has_experts(text, i))
