"""Parameters of MaxText's expert blocks as those of a layer, and back.

MaxText's names are those of `RoutedMoE`, `RoutedAndSharedMoE` and the block of Qwen3-Next in its
`layers/moe.py` and `models/qwen3.py` (at e591f30, August 2026).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from jax_ep._src.checkpoints.checkpoint import Params
from jax_ep._src.core.errors import ArgumentError

ROUTED = ("MoeBlock_0", "moe_block", "routed_experts", "routed_moe")
SHARED = ("shared_experts", "shared_expert")
SHARED_GATE = "shared_expert_gate"
DIMENSIONS = {
    "router_kernel": ("H", "E"),
    "w_down": ("E", "F", "H"),
    "w_up": ("E", "H", "gate and up", "F"),
    "b_up": ("E", "gate and up", "F"),
    "b_down": ("E", "H"),
}
"""The dimensions of a layer's parameters that both have. Shared experts have an F of their own."""

GateBias = Literal["selection_bias", "logits_bias"]
"""What the bias of a router is added to: scores for the choice of experts alone, or logits."""


def from_maxtext(
    block: Mapping[str, Any],
    *,
    scan_axis: int | None = None,
    layer_axis: int = 0,
    gate_bias: GateBias = "selection_bias",
) -> Params:
    """Returns the parameters of an expert block of MaxText for `nnx.MoE` and `linen.MoE`.

    Gate and up become one array, which is a copy; the other arrays are not copied without
    ``scan_axis``. Call it inside `jax.jit` with the ``out_shardings`` of the layer's parameters to
    place them::

        block = params["params"]["decoder"]["layers"]["moe_block"]
        stack = checkpoints.from_maxtext(block, scan_axis=1)  # [layers, ...], for a stack

    Args:
      block: the arrays of a block with ``gate``, ``wi_0`` [E, H, F], ``wi_1`` and ``wo`` [E, F, H],
        or of one that has it beside shared experts; in any dtype, in Flax's boxes or without.
        Biases may be there. An optimizer's moments are converted as the parameters are.
      scan_axis: MaxText's ``param_scan_axis``, the dimension of layers where they are scanned (1 if
        nothing else is set); None for the block of one layer.
      layer_axis: the dimension of layers in the results: 0 for stacks of jax_ep and for `nn.scan`
        with ``variable_axes={"params": 0}``, 1 for a model that scans as MaxText does.
      gate_bias: what the bias of the gate is. It is added to scores for the choice of experts alone
        in DeepSeek-V3 (``"selection_bias"``), and to logits in gpt-oss (``"logits_bias"``).

    Returns:
      Arrays by the names of the layer's attributes, such as ``router_kernel`` [H, E], ``w_up``
      [E, H, 2, F] and ``w_down`` [E, F, H]; with ``scan_axis`` each is a stack [layers, ...].

    Raises:
      ArgumentError (a ValueError): an array that is missing, one that is not known, or shapes that
        do not fit together.
    """
    if gate_bias not in get_args(GateBias):
        raise ArgumentError(
            f"jax_ep.checkpoints: gate_bias={gate_bias!r}; expected one of {get_args(GateBias)}."
        )
    routed, shared, shared_gate = _parts(_unboxed(block))
    found = _Arrays(routed, scan_axis)
    gate = _Arrays(found.tree("gate"), scan_axis)
    params = {"router_kernel": gate.take("kernel"), "w_down": found.take("wo")}
    if "wi" in routed:  # prefuse_moe_weights
        fused = found.take("wi")
        params["w_up"] = fused.reshape(*fused.shape[:-1], 2, -1)
    else:
        params["w_up"] = found.take_stacked("wi_0", "wi_1")
    if "bias" in gate.left:
        params[gate_bias] = gate.take("bias")
    if "wo_bias" in found.left:
        params["b_up"] = found.take_stacked("wi_0_bias", "wi_1_bias")
        params["b_down"] = found.take("wo_bias")
    if shared is not None:
        dense = _Arrays({name: _kernel(shared[name], scan_axis) for name in shared}, None)
        params["shared_w_up"] = dense.take_stacked("wi_0", "wi_1")
        params["shared_w_down"] = dense.take("wo")
        dense.check_all_taken()
    if shared_gate is not None:
        params["shared_gate"] = _kernel(shared_gate, scan_axis)
    gate.check_all_taken()
    found.check_all_taken()
    _check_shapes(params, scan_axis)
    if scan_axis is None:
        return params
    return {name: jnp.moveaxis(array, 0, layer_axis) for name, array in params.items()}


def to_maxtext(
    params: Mapping[str, jax.Array], *, scan_axis: int | None = None, layer_axis: int = 0
) -> dict[str, Any]:
    """Returns the parameters of a layer as those of MaxText: the inverse of `from_maxtext`.

    For example::

        block = checkpoints.to_maxtext(stack, scan_axis=1)  # {"gate": ..., "wi_0": ..., ...}

    Args:
      params: arrays by the names of the layer's attributes; with ``scan_axis`` stacks
        [layers, ...]. Rows of zeros that pad experts have to be cut off before.
      scan_axis: as for `from_maxtext`.
      layer_axis: as for `from_maxtext`.

    Returns:
      The block ``gate``, ``wi_0``, ``wi_1`` and ``wo`` with its biases. With shared experts it is
      ``MoeBlock_0`` beside ``shared_experts``, as DeepSeek's; with a gate for these,
      ``routed_experts`` beside ``shared_expert`` and ``shared_expert_gate``, as Qwen3-Next's.

    Raises:
      ArgumentError (a ValueError): an array that is missing, one that MaxText does not have, or
        shapes that do not fit together.
    """
    given = _Arrays(_unboxed(params), None if scan_axis is None else layer_axis)
    gate = {"kernel": given.take("router_kernel")}
    for bias in get_args(GateBias):
        if bias in given.left:
            gate["bias"] = given.take(bias)
    wi_0, wi_1 = jnp.unstack(given.take("w_up"), axis=-2)
    routed: dict[str, Any] = {"gate": gate, "wi_0": wi_0, "wi_1": wi_1, "wo": given.take("w_down")}
    if "b_up" in given.left:
        routed["wi_0_bias"], routed["wi_1_bias"] = jnp.unstack(given.take("b_up"), axis=-2)
        routed["wo_bias"] = given.take("b_down")
    block = routed
    if "shared_w_up" in given.left:
        wi_0, wi_1 = jnp.unstack(given.take("shared_w_up"), axis=-2)
        kernels = {"wi_0": wi_0, "wi_1": wi_1, "wo": given.take("shared_w_down")}
        shared = {name: {"kernel": kernel} for name, kernel in kernels.items()}
        block = {"MoeBlock_0": routed, "shared_experts": shared}
        if "shared_gate" in given.left:
            shared_gate = {"kernel": given.take("shared_gate")}
            block = {"routed_experts": routed, "shared_expert": shared, SHARED_GATE: shared_gate}
    given.check_all_taken()
    _check_shapes(given.taken, scan_axis)
    if scan_axis is None:
        return block
    return jax.tree.map(lambda array: jnp.moveaxis(array, 0, scan_axis), block)


def _unboxed(tree: Any) -> Any:
    """Takes arrays out of Flax's boxes, such as `nn.LogicallyPartitioned`."""

    def is_box(node: Any) -> bool:
        return hasattr(node, "unbox")

    return jax.tree.map(lambda node: node.unbox() if is_box(node) else node, tree, is_leaf=is_box)


def _check_shapes(params: Mapping[str, jax.Array], scan_axis: int | None) -> None:
    """Raises unless these shapes, with the layers first, are those of one layer, or of a stack."""
    lead = 0 if scan_axis is None else 1
    sizes: dict[str, int] = {}
    for name, dimensions in DIMENSIONS.items():
        if name not in params:
            continue
        shape = params[name].shape
        names = (*("layers",) * lead, *dimensions)
        known = {n: sizes.setdefault(n, size) for n, size in zip(names, shape, strict=False)}
        if len(shape) != len(names) or tuple(known[n] for n in names) != shape:
            expected = ", ".join(f"{n}={sizes[n]}" if n in sizes else n for n in names)
            raise ArgumentError(
                f"jax_ep.checkpoints: {name} would have the shape {shape}; expected [{expected}]. "
                f"scan_axis is {scan_axis}: give the dimension of layers in the block, 1 where "
                "MaxText scans its layers, and None for the block of one layer."
            )


def _parts(block: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Returns the routed experts of a block, its shared ones and their gate."""
    if "gate" in block:
        return block, None, None
    names = [name for name in ROUTED if name in block]
    shared = [name for name in SHARED if name in block]
    others = {*block} - {*names, *shared, SHARED_GATE}
    if len(names) != 1 or len(shared) > 1 or others:
        raise ArgumentError(
            f"jax_ep.checkpoints: a block of MaxText has {sorted(block)}; expected 'gate', 'wi_0', "
            f"'wi_1' and 'wo', or one of {ROUTED} with them, and beside it at most one of {SHARED} "
            f"and {SHARED_GATE!r}. Give the subtree of one expert block."
        )
    return block[names[0]], block[shared[0]] if shared else None, block.get(SHARED_GATE)


def _kernel(dense: Mapping[str, Any], scan_axis: int | None) -> jax.Array:
    """Returns the matrix of a dense layer, which has nothing else."""
    found = _Arrays(dense, scan_axis)
    kernel = found.take("kernel")
    found.check_all_taken()
    return kernel


class _Arrays:
    """Gives out the arrays of a tree by name, and knows which are left."""

    def __init__(self, tree: Mapping[str, Any], scan_axis: int | None):
        self.left = dict(tree)
        self.taken: Params = {}  # with the layers first
        self._names, self._scan_axis = sorted(tree), scan_axis

    def tree(self, name: str) -> Any:
        if name not in self.left:
            raise ArgumentError(
                f"jax_ep.checkpoints: {name!r} is missing among {self._names}; expected the arrays "
                "of a whole expert block. Give its whole subtree."
            )
        return self.left.pop(name)

    def take(self, name: str) -> jax.Array:
        array = self.tree(name)
        if self._scan_axis is not None:
            array = jnp.moveaxis(array, self._scan_axis, 0)
        self.taken[name] = array
        return array

    def take_stacked(self, gate: str, up: str) -> jax.Array:
        return jnp.stack((self.take(gate), self.take(up)), -2)

    def check_all_taken(self) -> None:
        if self.left:
            raise ArgumentError(
                f"jax_ep.checkpoints: {sorted(self.left)} among {self._names} have no counterpart; "
                "leave out those that the model can do without."
            )
