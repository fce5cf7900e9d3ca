"""The checks of a layer's options, and the mesh axes that they name."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jax_ep._src.core import checks, compat
from jax_ep._src.core.errors import ArgumentError, DtypeError
from jax_ep._src.core.expert_axis import AxisName
from jax_ep._src.layer.options import Options
from jax_ep._src.layer.router import LAYER, NAMED_ROUTERS, Router
from jax_ep._src.mlp.expert_forms import check_activation
from jax_ep._src.moe.params import check_weights_on_input
from jax_ep._src.quant.recipe import WeightsOnly, check_recipe

BATCH_AXES = ("data", "expert")
"""The batch axes that are known without a mesh, or where they are manual already."""


@dataclasses.dataclass(frozen=True)
class Axes:
    """Mesh axes, by what is sharded over them. Those that do not exist are left out."""

    batch: tuple[str, ...]
    sequence: tuple[str, ...]
    expert: tuple[str, ...]
    fsdp: tuple[str, ...]
    tensor: tuple[str, ...]

    @property
    def tokens(self) -> tuple[str, ...]:
        """The axes that tokens are sharded over."""
        return (*self.batch, *self.sequence)

    @property
    def all(self) -> tuple[str, ...]:
        """All axes, once each."""
        return tuple(dict.fromkeys((*self.tokens, *self.expert, *self.fsdp, *self.tensor)))

    def within(self, names: tuple[str, ...] | frozenset[str]) -> Axes:
        """The axes that are among `names`."""
        groups = (getattr(self, field.name) for field in dataclasses.fields(self))
        return Axes(*(tuple(n for n in group if n in names) for group in groups))


def spec_entry(names: tuple[str, ...]) -> str | tuple[str, ...] | None:
    """The entry of a partition spec for a dimension that is sharded over these axes."""
    return names[0] if len(names) == 1 else names or None


@dataclasses.dataclass(unsafe_hash=True)  # not frozen, as `Options` is not
class Config(Options):
    """The options of a layer, checked, and hashed by value.

    `router` is a name, or None for a router that the layer keeps beside its options.
    """

    _: dataclasses.KW_ONLY
    router: str | None = "softmax"

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size", "num_experts", "top_k"):
            checks.integer(LAYER, name, getattr(self, name))
        if self.shared_intermediate_size is not None:
            checks.integer(LAYER, "shared_intermediate_size", self.shared_intermediate_size)
        elif self.shared_gate:
            raise ArgumentError(
                f"jax_ep.{LAYER}: shared_gate is given without shared_intermediate_size; expected "
                "both or no gate. Give the size of the shared expert whose output it multiplies."
            )
        checks.integer(LAYER, "num_identity_experts", self.num_identity_experts, least=0)
        if self.latent_size is not None:
            checks.integer(LAYER, "latent_size", self.latent_size)
        if self.top_k > self.num_logits:
            raise ArgumentError(
                f"jax_ep.{LAYER}: top_k={self.top_k} with {self.num_logits} experts; expected at "
                "most one assignment per expert. Give a smaller top_k, or more experts."
            )
        advice = "For eight-bit matmuls give quantization=jax_ep.quant.Recipe()."
        checks.float_dtype(LAYER, "param_dtype", self.param_dtype, advice)
        if self.dtype is not None:
            checks.float_dtype(LAYER, "dtype", self.dtype, advice)
        check_activation(LAYER, self.activation)
        checks.capacity(LAYER, capacity_factor=self.capacity_factor)
        checks.integer(LAYER, "num_chunks", self.num_chunks)
        checks.remat(LAYER, self.remat)
        if self.quantization is not None:
            check_recipe(LAYER, self.quantization, weights_only=True)
            if isinstance(self.quantization, WeightsOnly) and not self.quantized_only:
                raise ArgumentError(
                    f"jax_ep.{LAYER}: quantization={self.quantization} is given without "
                    "quantized_only; expected both, as such a layer has no float matrices. Give "
                    "quantized_only=True, and quantized_weights to each call."
                )
        elif self.quantized_only:
            raise ArgumentError(
                f"jax_ep.{LAYER}: quantized_only is given without quantization; expected both or "
                "none. Give the jax_ep.quant.Recipe whose weights have the checkpoint's format."
            )
        if self.weights_on_input:
            check_weights_on_input(LAYER, self.quantization)
        if self.nvlink_domain_size is not None:
            checks.integer(LAYER, "nvlink_domain_size", self.nvlink_domain_size)
        checks.num_sms(LAYER, self.num_comm_sms, "num_comm_sms")
        checks.implementation(LAYER, self.implementation)
        if not isinstance(self.mesh, Mesh | AbstractMesh | None):
            raise DtypeError(
                f"jax_ep.{LAYER}: mesh is a {type(self.mesh).__name__}; expected a "
                "jax.sharding.Mesh. Make one by jax_ep.make_mesh, or leave it out under "
                "jax.set_mesh."
            )
        self._check_axes()
        for one, other in ("fsdp", "expert"), ("tensor", "expert"), ("tensor", "fsdp"):
            if shared := set(getattr(self.axes, one)) & set(getattr(self.axes, other)):
                raise ArgumentError(
                    f"jax_ep.{LAYER}: {one}_axis and {other}_axis have both {min(shared)!r}; "
                    "expected different axes, as they shard different dimensions of the matrices. "
                    "Leave one out, or give it an axis of its own."
                )
        if set(self.axes.tensor) & set(self.axes.tokens):
            raise ArgumentError(
                f"jax_ep.{LAYER}: tensor_axis={self.tensor_axis!r} is one of the axes "
                f"{self.axes.tokens} that tokens are sharded over. Give an axis of its own, or "
                "leave it out of batch_axes."
            )

    def _check_axes(self) -> None:
        """Raises unless all are names, and makes tuples of lists."""
        for name in ("expert_axis", "batch_axes", "sequence_axes", "fsdp_axis", "tensor_axis"):
            given, is_tuple = getattr(self, name), name in ("batch_axes", "sequence_axes")
            if given is None and name != "sequence_axes":
                continue
            names = (given,) if isinstance(given, str) else given
            if not (isinstance(names, tuple | list) and all(isinstance(n, str) for n in names)):
                raise DtypeError(
                    f"jax_ep.{LAYER}: {name}={given!r}; expected the name of a mesh axis, or a "
                    "tuple of names. Use () for no axis in batch_axes and sequence_axes, None "
                    "elsewhere."
                )
            if is_tuple or isinstance(given, list):
                setattr(self, name, tuple(names))

    @functools.cached_property
    def axes(self) -> Axes:
        """The axes that options name. The batch has those that tokens need, less the sequence's."""
        expert, fsdp, tensor = map(
            _names, (self.expert_axis or (), self.fsdp_axis or (), self.tensor_axis or ())
        )
        local = expert if self.local_only else ()
        batch_axes = BATCH_AXES if self.batch_axes is None else self.batch_axes
        tokens = dict.fromkeys((*batch_axes, *expert, *fsdp))
        batch = (name for name in tokens if name not in (*self.sequence_axes, *local))
        sequence = (name for name in self.sequence_axes if name not in local)
        return Axes(tuple(batch), tuple(sequence), expert, fsdp, tensor)

    def axes_on(self, mesh: Mesh | AbstractMesh) -> Axes:
        """The axes of `mesh`. By default tokens are split over all that no option names.

        They are not split over an axis that `jax.vmap` maps over, whose ranks have other layers,
        nor over a manual one that no option names, which may be one of pipeline stages.
        """
        vmapped = compat.vmapped_axes()
        axes = self.axes.within(frozenset(mesh.axis_names) - vmapped)
        if self.batch_axes is not None:
            return axes
        named = {*self.axes.all, *mesh.abstract_mesh.manual_axes, *vmapped}
        batch = (n for n in mesh.axis_names if n in axes.batch or n not in named)
        return dataclasses.replace(axes, batch=tuple(batch))

    @property
    def num_logits(self) -> int:
        """The experts that the router chooses from."""
        return self.num_experts + self.num_identity_experts

    @property
    def row_size(self) -> int:
        """The size of what experts get and return."""
        return self.hidden_size if self.latent_size is None else self.latent_size

    @property
    def is_gated(self) -> bool:
        """Whether w_up has a gate. A function says so by two arguments."""
        return check_activation(LAYER, self.activation) or False


def check_router(router: str | Router) -> None:
    """Raises unless it is a router's name, or may be called."""
    if not (callable(router) or router in NAMED_ROUTERS):
        raise ArgumentError(
            f"jax_ep.{LAYER}: router={router!r}; expected one of {tuple(NAMED_ROUTERS)}, or a "
            "function from logits and top_k to jax_ep.routing.Routing."
        )


def _names(axes: AxisName) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes)


def check_mesh(config: Config, mesh: Mesh | AbstractMesh) -> None:
    """Raises unless the layer can be laid out over `mesh`."""
    wanted, axes = config.axes, config.axes_on(mesh)
    if not set(wanted.expert).issubset(mesh.axis_names):
        raise ArgumentError(
            f"jax_ep.{LAYER}: the mesh has the axes {mesh.axis_names}; expected the expert axis "
            f"{spec_entry(wanted.expert)!r} among them. Give the mesh this axis, name another one "
            "with expert_axis=, or give expert_axis=None if every rank is to hold all experts."
        )
    for name in ("batch_axes", "sequence_axes", "fsdp_axis", "tensor_axis"):
        given = getattr(config, name)
        missing = [axis for axis in _names(given or ()) if axis not in mesh.axis_names]
        if missing:
            raise ArgumentError(
                f"jax_ep.{LAYER}: {name}={given!r} has {missing[0]!r}, which is no axis of the "
                f"mesh {mesh.axis_names}; expected one of these. Give the mesh this axis, of size "
                f"1 if need be, or leave it out of {name}."
            )
    if not (axes.tokens or config.local_only):
        raise ArgumentError(
            f"jax_ep.{LAYER}: the mesh has the axes {mesh.axis_names}, and tokens are sharded over "
            "none of them; expected one or several. Add one, of size 1 if need be, or name the "
            "mesh's in batch_axes."
        )
    shape = dict(mesh.shape)
    for name, size, over in (
        ("hidden_size", config.hidden_size, axes.fsdp),
        ("latent_size", config.latent_size or 0, axes.fsdp),
        ("intermediate_size", config.intermediate_size, axes.tensor),
        ("shared_intermediate_size", config.shared_intermediate_size or 0, axes.tensor),
    ):
        shards = math.prod(shape[axis] for axis in over)
        if size % shards:
            raise ArgumentError(
                f"jax_ep.{LAYER}: {name}={size} does not divide over the {shards} shards of mesh "
                f"axis {over}. Use {-(-size // shards) * shards}, or a mesh that divides {size}."
            )


def check_input(config: Config, x: Any, token_mask: Any, topk_ids: Any) -> None:
    """Raises unless x has tokens of the layer's hidden size, and mask and ids fit."""
    checks.array(LAYER, "x", x)
    checks.known_sizes(LAYER, "x", x, x.shape)
    if x.ndim < 2 or x.shape[-1] != config.hidden_size:
        raise ArgumentError(
            f"jax_ep.{LAYER}: x has shape {x.shape}; expected [..., {config.hidden_size}] with at "
            "least one dimension of tokens before the last."
        )
    if topk_ids is not None:
        checks.shape(LAYER, "topk_ids", topk_ids, (*x.shape[:-1], config.top_k))
        checks.ids_dtype(LAYER, topk_ids)
    if token_mask is not None:
        checks.shape(LAYER, "token_mask", token_mask, x.shape[:-1])
        if not (token_mask.dtype == jnp.bool_ or jnp.issubdtype(token_mask.dtype, jnp.integer)):
            raise DtypeError(
                f"jax_ep.{LAYER}: token_mask has dtype {token_mask.dtype}; expected bool, True for "
                "tokens. Compare it: token_mask > 0, or token_mask == 0 for one that is added to "
                "logits."
            )
