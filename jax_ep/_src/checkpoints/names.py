"""Which tensors fill the parameters of a layer, by its family's table."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from typing import Any

from jax_ep._src.checkpoints import pieces
from jax_ep._src.checkpoints.families import Family, Layout
from jax_ep._src.checkpoints.pieces import Piece, View
from jax_ep._src.quant.formats import BLOCK, Format, matrix_scales, num_blocks
from jax_ep._src.quant.microscaling import MxFp4

Pieces = dict[str, list[Piece]]

SCALE = "_scale_inv"
"""What the name of a tensor in blocks has at its end, if it is that of its scales."""

PACKED = ("_blocks", "_scales")
"""The same of tensors in MXFP4: bytes of two values each, and their scales."""

IGNORED = (
    r"(^|\.)mtp\.",
    r"(^|\.)(vision_tower|vision_model|vision_encoder|visual|multi_modal_projector|mm_projector)\.",
    r"rotary_emb\.inv_freq$",
)


def is_ignored(family: Family, name: str, num_layers: int) -> bool:
    """Whether a tensor is of a vision tower or of multi-token prediction, or can be computed."""
    layer = re.match(rf"{re.escape(family.layers)}\.(\d+)\.", name)
    beyond = layer is not None and int(layer[1]) >= num_layers
    return beyond or any(re.search(pattern, name) for pattern in IGNORED)


def layout_of(family: Family, layer: int, names: Container[str]) -> Layout:
    """Returns the layout of the experts in a file: transformers 5 may stack them."""
    stacked = f"{family.layers}.{layer}.{family.stacked_block}.experts.gate_up_proj"
    return "stacked" if family.layout == "each" and stacked in names else family.layout


def pieces_of(
    family: Family,
    layer: int,
    options: Mapping[str, Any],
    layout: Layout,
    *,
    packed: bool = False,
    kept: Format | None = None,
) -> Pieces:
    """Returns what fills each parameter of a layer.

    Args:
      family: its table.
      layer: its index.
      options: of the layer.
      layout: of the experts.
      packed: experts are in MXFP4 and become floats, one expert after the other.
      kept: the format in which experts stay quantized.
    """
    block = family.stacked_block if layout == "stacked" else family.block
    module = f"{family.layers}.{layer}.{block}."
    hidden = options["hidden_size"]
    count, size = options["num_experts"], options["intermediate_size"]
    found: Pieces = {}

    def whole(param: str, name: str, view: View, shape: tuple[int, ...]) -> None:
        found[param] = [Piece((), module + name, view, shape)]

    whole("router_kernel", family.router, pieces.transposed, (count, hidden))
    if family.logits_bias:
        whole("logits_bias", family.logits_bias, pieces.same, (count,))
    if options.get("selection_bias"):
        whole("selection_bias", str(family.selection_bias), pieces.same, (count,))
    experts = f"{module}experts."
    if isinstance(kept, MxFp4):
        found |= _four_bits(experts, count, hidden, size)
    elif kept is not None:
        found |= _blocks(family, experts, count, hidden, size)
    elif packed:
        found |= _packed(experts, count, hidden, size)
    elif layout == "each":
        up, down = [], []
        for e in range(count):
            gate_name, up_name, down_name = (f"{experts}{e}.{p}.weight" for p in family.projections)
            every = slice(None)
            up.append(Piece((e, every, 0), gate_name, pieces.transposed, (size, hidden)))
            up.append(Piece((e, every, 1), up_name, pieces.transposed, (size, hidden)))
            down.append(Piece((e,), down_name, pieces.transposed, (hidden, size)))
        found |= {"w_up": up, "w_down": down}
    else:
        is_linear = layout == "stacked"
        views = {
            "stacked": pieces.gate_first_rows,
            "interleaved": pieces.interleaved,
            "halves": pieces.gate_first,
        }
        up_shape = (count, 2 * size, hidden) if is_linear else (count, hidden, 2 * size)
        down_shape = (count, hidden, size) if is_linear else (count, size, hidden)
        down_view = pieces.transposed if is_linear else pieces.same
        whole("w_up", "experts.gate_up_proj", views[layout], up_shape)
        whole("w_down", "experts.down_proj", down_view, down_shape)
    if options.get("use_bias"):
        whole("b_up", "experts.gate_up_proj_bias", pieces.interleaved, (count, 2 * size))
        whole("b_down", "experts.down_proj_bias", pieces.same, (count, hidden))
    shared = options.get("shared_intermediate_size")
    if shared:
        names = [f"{module}{family.shared}.{p}_proj.weight" for p in ("gate", "up", "down")]
        found["shared_w_up"] = [
            Piece((slice(None), c), names[c], pieces.transposed, (shared, hidden)) for c in (0, 1)
        ]
        found["shared_w_down"] = [Piece((), names[2], pieces.transposed, (hidden, shared))]
    if options.get("shared_gate"):
        whole("shared_gate", str(family.shared_gate), pieces.transposed, (1, hidden))
    return found


def _packed(experts: str, count: int, hidden: int, size: int) -> Pieces:
    up = (f"{experts}gate_up_proj", pieces.interleaved_rows, (count, 2 * size, hidden))
    down = (f"{experts}down_proj", pieces.transposed, (count, hidden, size))
    found = {}
    for param, (name, view, shape) in {"w_up": up, "w_down": down}.items():
        found[param] = [Piece((e,), name, view, shape, part=e) for e in range(count)]
    return found


KEPT_PARAMS = ("up_values", "up_scales", "down_values", "down_scales")
"""The arrays of `QuantizedExperts` that `_blocks` fills, or their bytes, as `_four_bits` does."""


def _blocks(family: Family, experts: str, count: int, hidden: int, size: int) -> Pieces:
    found: Pieces = {name: [] for name in KEPT_PARAMS}
    for e in range(count):
        gate, up, down = (f"{experts}{e}.{p}.weight" for p in family.projections)
        for part, suffix, unit in ("values", "", 1), ("scales", SCALE, BLOCK):
            rows, columns = num_blocks(size, unit), num_blocks(hidden, unit)
            for i, name in enumerate((gate, up)):
                at = (e, slice(i * rows, (i + 1) * rows))
                piece = Piece(at, name + suffix, pieces.same, (rows, columns))
                found[f"up_{part}"].append(piece)
            piece = Piece((e,), down + suffix, pieces.same, (columns, rows))
            found[f"down_{part}"].append(piece)
    return found


def _four_bits(experts: str, count: int, hidden: int, size: int) -> Pieces:
    found: Pieces = {}
    block = MxFp4().block
    for param, tensor, view, rows, columns in (
        ("up", "gate_up_proj", pieces.gate_and_up_rows, 2 * size, hidden),
        ("down", "down_proj", pieces.joined_blocks, hidden, size),
    ):
        values, scales = (f"{experts}{tensor}{suffix}" for suffix in PACKED)
        shape = (count, rows, num_blocks(columns, block))
        found[f"{param}_values"] = [Piece((), values, view, (*shape, block // 2))]
        found[f"{param}_scales"] = [Piece((), scales, view, shape)]
    return found


def kept_shapes(
    options: Mapping[str, Any], format: Format, padded: int
) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of `KEPT_PARAMS`: of four bits two per byte, with gate and up apart."""
    hidden, size = options["hidden_size"], options["intermediate_size"]
    is_packed = isinstance(format, MxFp4)
    up = (padded, 2, size, hidden) if is_packed else (padded, 2 * size, hidden)
    shapes = []
    for *leading, columns in (up, (padded, hidden, size)):
        shapes += [
            (*leading, columns // 2 if is_packed else columns),
            matrix_scales(format, (*leading, columns)),
        ]
    return dict(zip(KEPT_PARAMS, shapes, strict=True))
