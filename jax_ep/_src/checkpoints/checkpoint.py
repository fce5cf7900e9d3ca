"""The arrays of a checkpoint, between `load` and `save`."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import jax
import numpy as np

from jax_ep._src.quant.recipe import QuantizedExperts

Params = dict[str, jax.Array]
"""Arrays by name."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """The arrays of a checkpoint. Replace some by `dataclasses.replace`, and `save` it.

    Attributes:
      config: the entries of config.json.
      layers: the parameters of each layer with experts, by the layer's index and the names of
        `jax_ep.nnx.MoE`'s attributes, ``"selection_bias"`` among them. With ``stacked=True`` one
        entry, whose index is that of the first layer, with a leading dimension of layers.
      quantized: the `quantized_weights` of layers whose experts stay in eight or four bits, by the
        same indices; empty if none does.
      other: all other tensors by their names in the files, in their shapes and dtypes.
      ignored: the names of tensors that are not read: multi-token prediction, vision towers,
        ``rotary_emb.inv_freq``, and those that `other` left out.
      layer_indices: the layers with experts, in the order of a stack.
      is_stacked: whether `layers` has one stack.
      bytes_read: how many bytes of the files this process has read.
      folder: where the checkpoint was.
      file_dtypes: the dtypes of the tensors that were read, by name.
    """

    config: dict[str, Any]
    layers: dict[int, Params]
    quantized: dict[int, QuantizedExperts]
    other: Params
    ignored: tuple[str, ...]
    layer_indices: tuple[int, ...]
    is_stacked: bool
    bytes_read: int
    folder: pathlib.Path
    file_dtypes: dict[str, np.dtype[Any]]


def linen_variables(params: Params) -> dict[str, Any]:
    """Returns the variables of `jax_ep.linen.MoE` with the parameters of one entry of `layers`.

    Args:
      params: arrays by the names of `jax_ep.nnx.MoE`'s attributes, such as ``router_kernel`` [H, E]
        and ``w_down`` [E, F, H], in any dtype. They are not copied.

    Returns:
      ``{"params": ...}``, and the collection ``"selection_bias"`` if there is one::

        y, stats = layer.apply(checkpoints.linen_variables(loaded.layers[3]), x)
    """
    name = "selection_bias"
    variables: dict[str, Any] = {"params": {k: v for k, v in params.items() if k != name}}
    return variables | ({name: {name: params[name]}} if name in params else {})
