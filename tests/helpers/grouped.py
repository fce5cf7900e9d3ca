"""Kinds of group sizes, and the matmuls with epilogues and the MLP in numpy's float64, group by group.

Pre-activations are flat: for a gated activation the first half of the columns is the gate.
"""

from __future__ import annotations

import numpy as np
import numpy_moe

import jax_ep

GROUP_SIZES = {
    "usual": [5, 0, 7, 3],
    "full": [20, 4, 6, 2],
    "one_group_has_all": [0, 32, 0, 0],
    "empty": [0, 0, 0, 0],
    "negative": [5, -3, 8, 2],
    "very_negative": [-(2**31), 3, -(2**31), 4],
    "past_the_end": [20, 20, 5, 1],
    "far_past_the_end": [2**31 - 1, 2**31 - 1, 2**31 - 1, 5],
}
CLAMPED = jax_ep.ClampedSwiGlu(limit=1.3, alpha=1.6)
GATED = {"swiglu": "silu", "geglu": "gelu", CLAMPED: "clamped"}
ACTIVATIONS = ("relu", "relu2", "silu", "gelu", "swiglu", "geglu")


def end_of(group_sizes, num_rows: int) -> int:
    """Where the tail begins."""
    return list(numpy_moe.group_slices(group_sizes, num_rows))[-1].stop


def function(name, x):
    return {
        "relu": lambda: np.maximum(x, 0),
        "relu2": lambda: np.maximum(x, 0) ** 2,
        "silu": lambda: numpy_moe.silu(x),
        "gelu": lambda: numpy_moe.gelu(x),
    }[name]()


def slope(name, x):
    if name == "relu":
        return (x > 0).astype(np.float64)
    if name == "relu2":
        return 2 * np.maximum(x, 0)
    if name == "silu":
        sigmoid = 1 / (1 + np.exp(-x))
        return sigmoid * (1 + x * (1 - sigmoid))
    scale = np.sqrt(2 / np.pi)
    tanh = np.tanh(scale * (x + 0.044715 * x**3))
    return 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh**2) * scale * (1 + 3 * 0.044715 * x**2)


def activate(name, pre):
    """[M, N] -> [M, F]."""
    pre = pre.astype(np.float64)
    if name not in GATED:
        return function(name, pre)
    gate, up = np.split(pre, 2, axis=1)
    if name == CLAMPED:
        gate, up = np.minimum(gate, 1.3), np.clip(up, -1.3, 1.3)
        return gate / (1 + np.exp(-1.6 * gate)) * (up + 1)
    return function(GATED[name], gate) * up


def activate_gradient(name, pre, hidden_bar):
    """[M, N]."""
    pre = pre.astype(np.float64)
    if name not in GATED:
        return hidden_bar * slope(name, pre)
    gate, up = np.split(pre, 2, axis=1)
    if name == CLAMPED:
        clipped, factor = np.minimum(gate, 1.3), np.clip(up, -1.3, 1.3) + 1
        sigmoid = 1 / (1 + np.exp(-1.6 * clipped))
        of_gate = (gate < 1.3) * factor * sigmoid * (1 + 1.6 * clipped * (1 - sigmoid))
        of_up = (np.abs(up) < 1.3) * clipped * sigmoid
        return np.concatenate([hidden_bar * of_gate, hidden_bar * of_up], axis=1)
    of_gate = hidden_bar * up * slope(GATED[name], gate)
    return np.concatenate([of_gate, hidden_bar * function(GATED[name], gate)], axis=1)


def bias_rows(bias, group_sizes, num_rows):
    """[M, N]: each row's bias; zeros in the tail."""
    rows = np.zeros((num_rows, bias.shape[1]))
    for group, where in enumerate(numpy_moe.group_slices(group_sizes, num_rows)):
        rows[where] = bias[group]
    return rows


def matmul_activation(name, lhs, rhs, group_sizes, bias=None, weights=None):
    """Output and pre-activation; the output of unrounded sums."""
    pre = numpy_moe.grouped_matmul(lhs, rhs, group_sizes)
    if bias is not None:
        pre = pre + bias_rows(bias, group_sizes, len(lhs))
    out = pre if name == "none" else activate(name, pre)
    return (out if weights is None else weights[:, None].astype(np.float64) * out), pre


def matmul_activation_gradient(name, out_bar, rhs, group_sizes, pre, weights=None):
    """Gradient of the pre-activation, weighted activations, the dots by blocks of 128; and the sums of absolute terms."""
    sums = numpy_moe.grouped_matmul(out_bar, rhs, group_sizes, transpose_rhs=True)
    hidden = activate(name, pre)
    blocks = range(0, hidden.shape[1], 128)
    by_block = lambda terms: np.stack([terms[:, i : i + 128].sum(1) for i in blocks], axis=1)
    dots, magnitudes = by_block(hidden * sums), by_block(np.abs(hidden * sums))
    scale = 1.0 if weights is None else weights[:, None].astype(np.float64)
    return activate_gradient(name, pre, scale * sums), scale * hidden, dots, magnitudes


def mlp(name, rows, w_up, w_down, group_sizes, row_weights=None, b_up=None, b_down=None):
    """[M, H], with the arguments of `jax_ep.grouped_mlp`; nothing is rounded in between."""
    flat = lambda a: None if a is None else a.reshape(len(a), -1).astype(np.float64)
    w_up = w_up.reshape(*w_up.shape[:2], -1)
    hidden, _ = matmul_activation(name, rows, w_up, group_sizes, flat(b_up))
    out, _ = matmul_activation("none", hidden, w_down, group_sizes, flat(b_down), row_weights)
    return out
