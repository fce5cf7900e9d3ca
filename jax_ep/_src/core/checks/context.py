"""Checks of where a call stands: its mesh, and its implementation."""

from __future__ import annotations

import os
from collections.abc import Sequence

import jax

from jax_ep._src.core import compat
from jax_ep._src.core.errors import ArgumentError
from jax_ep._src.core.expert_axis import AxisName, ExpertAxis

IMPLEMENTATIONS = ("cuda", "xla")


def expert_axis(operation: str, axis_name: AxisName) -> ExpertAxis:
    """The expert axis named `axis_name` in the `shard_map` that is being traced."""
    mesh = jax.sharding.get_abstract_mesh()
    names: tuple[str, ...] = (axis_name,) if isinstance(axis_name, str) else ()
    if isinstance(axis_name, tuple | list):
        names = tuple(axis_name)
    if not names or len(set(names)) != len(names):
        raise ArgumentError(
            f"jax_ep.{operation}: axis_name={axis_name!r} names no axis or one axis twice. "
            "Give the name of the expert axis, or a tuple of distinct names."
        )
    wrap = f"jax.shard_map(..., axis_names={set(names)!r})"
    if mesh.empty:
        raise ArgumentError(
            f"jax_ep.{operation}: called outside shard_map (no mesh in context), with axis_name="
            f"{axis_name!r}. Call it in a function wrapped by {wrap}."
        )
    unknown = [name for name in names if name not in mesh.axis_names]
    if unknown:
        raise ArgumentError(
            f"jax_ep.{operation}: unknown axis {unknown[0]!r} in axis_name={axis_name!r}. "
            f"The mesh in context has the axes {mesh.axis_names}. Give one or several of these."
        )
    automatic = [name for name in names if name not in mesh.manual_axes]
    if automatic:
        raise ArgumentError(
            f"jax_ep.{operation}: called outside shard_map: axis {automatic[0]!r} of the mesh is "
            f"not manual here. Call it in a function wrapped by {wrap}."
        )
    name = names[0] if len(names) == 1 else names
    return ExpertAxis(name, tuple(mesh.shape.items()))


def own_axis() -> ExpertAxis:
    """No axis, in the mesh in context: a rank exchanges with itself alone."""
    return ExpertAxis((), tuple(jax.sharding.get_abstract_mesh().shape.items()))


def replicated(operation: str, avals: Sequence[compat.Aval]) -> None:
    """Raises if an operand is sharded over an Explicit axis that is not manual."""
    for index, aval in enumerate(avals):
        axes = compat.explicit_axes(aval)
        if axes:
            raise ArgumentError(
                f"jax_ep.{operation}: operand {index} of shape {aval.shape} is sharded over the "
                f"Explicit mesh axis {axes[0]!r}, which is not manual here; expected operands "
                "replicated over it. Add the axis to shard_map's axis_names, or use "
                "jax.sharding.reshard before the call."
            )


def implementation(operation: str, implementation: str | None) -> str | None:
    """`implementation`, or the default that the environment variable sets."""
    source = "implementation"
    if implementation is None:
        source = "JAX_EP_IMPLEMENTATION"
        implementation = os.environ.get(source) or None
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ArgumentError(
            f"jax_ep.{operation}: {source}={implementation!r} is not an implementation. "
            f"Use one of {IMPLEMENTATIONS}, or None to choose by platform."
        )
    return implementation
