"""Serializes the pytrees of jax_ep: for exported programs, and for state dicts of Flax."""

from __future__ import annotations

import ast
import dataclasses
import sys
from typing import Any

import jax
import numpy as np

from jax_ep._src.core.errors import ArgumentError
from jax_ep._src.layer.local import MoEStats
from jax_ep._src.matmul.accumulation import Accumulators
from jax_ep._src.moe.stats import Stats
from jax_ep._src.quant.formats import Format
from jax_ep._src.quant.quantized import Quantized
from jax_ep._src.quant.recipe import QuantizedWeights
from jax_ep._src.routing.routers import Routing
from jax_ep._src.transfer.domains import Forwarding
from jax_ep._src.transfer.plan import Dispatched, Plan

_WITHOUT_STATIC_FIELDS = (
    (QuantizedWeights, "quant.QuantizedWeights"),
    (Plan, "Plan"),
    (Dispatched, "Dispatched"),
    (Stats, "Stats"),
    (MoEStats, "nnx.MoEStats"),
)


def _static_to_bytes(static: tuple[Any, ...]) -> bytes:
    """Literals: the static fields of a class."""
    return repr(static).encode()


def _static_from_bytes(data: bytes | bytearray) -> Any:
    return ast.literal_eval(bytes(data).decode())


def _format_to_bytes(static: tuple[Any, ...]) -> bytes:
    """The class and the options of a format, in their order."""
    (format,) = static
    options = (getattr(format, field.name) for field in dataclasses.fields(format))
    literals = (option.name if isinstance(option, np.dtype) else option for option in options)
    return _static_to_bytes((type(format).__name__, *literals))


def _format_from_bytes(data: bytes | bytearray) -> Any:
    name, *options = _static_from_bytes(data)  # older programs have fewer options
    classes = {format.__name__: format for format in _subclasses(Format)}
    return (classes[name](*options),)


def _subclasses(of: type[Any]) -> list[type[Any]]:
    return [found for one in of.__subclasses__() for found in (one, *_subclasses(one))]


def register() -> None:
    """Called once, by the package."""
    jax.export.register_pytree_node_serialization(
        Quantized,
        serialized_name="jax_ep.quant.Quantized",
        serialize_auxdata=_format_to_bytes,
        deserialize_auxdata=_format_from_bytes,
    )
    for dataclass, name in _WITHOUT_STATIC_FIELDS:
        jax.export.register_pytree_node_serialization(
            dataclass,
            serialized_name=f"jax_ep.{name}",
            serialize_auxdata=_static_to_bytes,
            deserialize_auxdata=_static_from_bytes,
        )
    for namedtuple, name in (
        (Accumulators, "Accumulators"),
        (Forwarding, "Forwarding"),
        (Routing, "routing.Routing"),
    ):
        jax.export.register_namedtuple_serialization(namedtuple, serialized_name=f"jax_ep.{name}")
    if "flax" in sys.modules:
        register_with_flax()


# ---- state dicts of Flax


def register_with_flax() -> None:
    """Called by what imports Flax, which is optional and slow to import.

    A state dict has the arrays. Static fields are those of the target, as in `flax.struct`.
    """
    from flax import serialization

    for dataclass, name in (*_WITHOUT_STATIC_FIELDS, (Quantized, "quant.Quantized")):
        _register_with_flax(serialization, dataclass, f"jax_ep.{name}")


def _register_with_flax(serialization: Any, dataclass: type[Any], class_name: str) -> None:
    is_static = {f.name: f.metadata.get("static", False) for f in dataclasses.fields(dataclass)}
    arrays = [name for name, static in is_static.items() if not static]

    def names_of(x: Any) -> list[str]:
        # Only one format has a scale per tensor.
        return [name for name in arrays if name != "tensor_scale" or x.tensor_scale is not None]

    def to_state_dict(x: Any) -> dict[str, Any]:
        return {name: serialization.to_state_dict(getattr(x, name)) for name in names_of(x)}

    def from_state_dict(target: Any, state: dict[str, Any]) -> Any:
        names = names_of(target)
        if set(state) != set(names):
            raise ArgumentError(
                f"{class_name}: a state dict has the fields {sorted(state)}; expected "
                f"{sorted(names)}. Give a target of the structure that was saved."
            )
        restored = {
            name: serialization.from_state_dict(getattr(target, name), state[name], name=name)
            for name in names
        }
        return dataclasses.replace(target, **restored)

    serialization.register_serialization_state(
        dataclass, to_state_dict, from_state_dict, override=True
    )
