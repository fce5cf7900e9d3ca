"""Flax's logical partitioning: a linen layer's dimensions by the names of the user's rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from flax import linen as nn
from flax.linen.spmd import logical_to_mesh_axes
from jax.sharding import AbstractMesh, Mesh

from jax_ep._src.core.errors import ArgumentError
from jax_ep._src.core.primitive import warn_once
from jax_ep._src.layer.boxes import Partitioned
from jax_ep._src.layer.config import Axes, Config
from jax_ep._src.layer.options import LogicalAxes
from jax_ep._src.layer.parameters import Parameter, parameters
from jax_ep._src.layer.router import LAYER

DIMENSIONS = ("experts", "hidden", "intermediate")
Names = tuple[Any, ...]


def names_of(config: Config, logical_axes: LogicalAxes) -> dict[str, Names]:
    """Returns the logical names of every parameter's dimensions."""
    if not isinstance(logical_axes, Mapping) or not {"experts"} <= {*logical_axes} <= {*DIMENSIONS}:
        given = dict(logical_axes) if isinstance(logical_axes, Mapping) else logical_axes
        raise ArgumentError(
            f"jax_ep.{LAYER}: logical_axes={given!r}; expected a mapping from 'experts', "
            f"maybe also others of {DIMENSIONS}, to names for which nn.logical_axis_rules have "
            "rules. Give {'experts': 'exp'}, for example, with a rule ('exp', 'expert')."
        )
    experts, hidden, intermediate = ((name,) for name in DIMENSIONS)
    by_dimension = parameters(config, Axes((), (), experts, hidden, intermediate))
    return {
        name: tuple(None if entry is None else logical_axes.get(entry) for entry in param.spec)
        for name, param in by_dimension.items()
    }


def boxed(
    name: str,
    param: Parameter,
    value: jax.Array,
    mesh: Mesh | AbstractMesh | None,
    known: tuple[str, ...],
    names: Names | None,
) -> nn.Partitioned[Any]:
    """Returns the parameter in its box, and checks that rules in context shard it as needed.

    `names` are logical; without them the box has mesh axes, of those that are `known`.
    """
    rules = tuple(nn.get_logical_axis_rules())
    given = tuple(param.spec) if names is None else names
    translated = logical_to_mesh_axes(given, rules) or ()
    for dimension, (logical, wanted, found) in enumerate(
        zip(given, param.spec, translated, strict=True)
    ):
        sizes = {} if mesh is None else dict(mesh.shape)
        lost = [a for a in _axes(wanted) if sizes.get(a, 1) > 1 and a not in _axes(found)]
        added = [a for a in _axes(found) if sizes.get(a, 1) > 1 and a not in _axes(wanted)]
        if not lost and added and names is not None:
            warn_once(
                f"added axes {name}",
                f"jax_ep.{LAYER}: nn.logical_axis_rules shard dimension {dimension} of {name}, "
                f"{logical!r}, over mesh axis {added[0]!r} as well, which the layer does not know: "
                "each call gathers it. Name the axis in the layer's options (fsdp_axis for H), or "
                "give the dimension another name in logical_axes.",
            )
        if not lost:
            continue
        if names is None and rules:
            warn_once(
                f"logical axes {name}",
                f"jax_ep.{LAYER}: nn.logical_axis_rules have no rule for mesh axis {lost[0]!r}, "
                f"over which dimension {dimension} of {name} is sharded: nn.logical_to_mesh would "
                "leave it, and its optimizer state, whole on every device. Give logical_axes=, or "
                f"add the rule ({lost[0]!r}, {lost[0]!r}).",
            )
        elif names is not None and not rules:
            warn_once(
                f"no rules {name}",
                f"jax_ep.{LAYER}: logical_axes is given without nn.logical_axis_rules in context: "
                f"nothing tells whether dimension {dimension} of {name} will be sharded over mesh "
                f"axis {lost[0]!r}. Make the parameters under nn.logical_axis_rules(rules).",
            )
        elif names is not None and logical is None:
            raise ArgumentError(
                f"jax_ep.{LAYER}: logical_axes have no name for dimension {dimension} of {name}, "
                f"which the layer shards over mesh axis {lost[0]!r}; expected names for all "
                "dimensions that it shards. Add 'hidden' or 'intermediate' to logical_axes."
            )
        elif names is not None:
            raise ArgumentError(
                f"jax_ep.{LAYER}: logical_axes call dimension {dimension} of {name} {logical!r}, "
                f"which nn.logical_axis_rules shard over {found!r}; expected mesh axis {lost[0]!r} "
                f"of the layer. Add the rule ({logical!r}, {lost[0]!r}) before others of this "
                "dimension or axis, or name the dimension in logical_axes."
            )
    if names is None:
        return Partitioned(value, given, mesh_axes=known)
    return nn.LogicallyPartitioned(value, names)


def _axes(entry: Any) -> tuple[str, ...]:
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)
