"""Serializes the pytrees of jax_ep, which exported programs may take or return."""

from __future__ import annotations

import ast
from typing import Any

import jax

from jax_ep._src.accumulation import Accumulators
from jax_ep._src.moe_layer.layer import MoEStats
from jax_ep._src.plan import Dispatched, Plan
from jax_ep._src.quantized import Fp8Block128, Fp8Row, Quantized
from jax_ep._src.recipe import QuantizedWeights
from jax_ep._src.stats import Stats
from jax_ep.routing import Routing


def _static_to_bytes(static: tuple[Any, ...]) -> bytes:
    """Literals: the static fields of a class."""
    return repr(static).encode()


def _static_from_bytes(data: bytes | bytearray) -> Any:
    return ast.literal_eval(bytes(data).decode())


def _format_to_bytes(static: tuple[Any, ...]) -> bytes:
    (format,) = static
    if isinstance(format, Fp8Row):
        return _static_to_bytes(("Fp8Row", format.dtype.name, format.scale_rounding))
    return _static_to_bytes(("Fp8Block128", format.scale_rounding))


def _format_from_bytes(data: bytes | bytearray) -> Any:
    name, *options = _static_from_bytes(data)
    return ({"Fp8Row": Fp8Row, "Fp8Block128": Fp8Block128}[name](*options),)


def register() -> None:
    """Called once, by the package."""
    jax.export.register_pytree_node_serialization(
        Quantized,
        serialized_name="jax_ep.quant.Quantized",
        serialize_auxdata=_format_to_bytes,
        deserialize_auxdata=_format_from_bytes,
    )
    for dataclass, name in (
        (QuantizedWeights, "quant.QuantizedWeights"),
        (Plan, "Plan"),
        (Dispatched, "Dispatched"),
        (Stats, "Stats"),
        (MoEStats, "nnx.MoEStats"),
    ):
        jax.export.register_pytree_node_serialization(
            dataclass,
            serialized_name=f"jax_ep.{name}",
            serialize_auxdata=_static_to_bytes,
            deserialize_auxdata=_static_from_bytes,
        )
    for namedtuple, name in (
        (Accumulators, "Accumulators"),
        (Routing, "routing.Routing"),
    ):
        jax.export.register_namedtuple_serialization(namedtuple, serialized_name=f"jax_ep.{name}")
