"""The types in jax_ep's signatures, for annotations in other code.

AxisName: a mesh axis, or a tuple of axes that form one together.
Activation: a name, a `jax_ep.ClampedSwiGlu`, or a function of (gate, up) or of one array.
UpWeights, UpBiases: w_up and b_up, each one array or a (gate, up) pair.
SharedExpert: (w_up, w_down) of an MLP that every token goes through.
ExpertsFunction: computes the experts' outputs from rows, group_sizes, w_up, w_down and adapters.
GroupScore: how a group of experts is rated in the selection of a router.
LayerIndex: an int, or an integer scalar on the device.
LogicalAxes: logical names of the dimensions "experts", "hidden" and "intermediate" of linen.MoE.
Remat: what `moe_mlp` repeats in the backward pass instead of keeping it.
Router: maps logits [T, E] and K to a `routing.Routing`.
QuantizedExperts: the `quant.QuantizedWeights` of w_up and of w_down.
Rows: an array, or `quant.Quantized`.
ScaleRounding: whether scales are rounded to powers of two.
Stack: runs the layers of a stacked module; `nnx.MoE.stack` and `linen.MoE.stack` make it.
"""

from __future__ import annotations

from jax_ep._src.core.expert_axis import AxisName
from jax_ep._src.layer.options import LogicalAxes
from jax_ep._src.layer.router import Router
from jax_ep._src.layer.stack import Stack
from jax_ep._src.matmul.activations import Activation
from jax_ep._src.matmul.layer_stack import LayerIndex
from jax_ep._src.mlp.expert_forms import UpBiases, UpWeights
from jax_ep._src.moe.params import Remat
from jax_ep._src.moe.shared_expert import SharedExpert
from jax_ep._src.moe.users_experts import ExpertsFunction
from jax_ep._src.quant.formats import ScaleRounding
from jax_ep._src.quant.recipe import QuantizedExperts
from jax_ep._src.routing.selection import GroupScore
from jax_ep._src.transfer.primitives import Rows

__all__ = [
    "Activation",
    "AxisName",
    "ExpertsFunction",
    "GroupScore",
    "LayerIndex",
    "LogicalAxes",
    "QuantizedExperts",
    "Remat",
    "Router",
    "Rows",
    "ScaleRounding",
    "SharedExpert",
    "Stack",
    "UpBiases",
    "UpWeights",
]
