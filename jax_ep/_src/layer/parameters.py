"""The parameters of a layer: names, shapes, partition specs and initial values.

`nnx.MoE` and `linen.MoE` make theirs from this table, so that one reads the other's checkpoints.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jax_ep._src.core import compat
from jax_ep._src.layer.config import Axes, Config, spec_entry
from jax_ep._src.layer.padded_experts import keys_of_experts, padded, without_padding

OF_EXPERTS = ("w_up", "w_down", "b_up", "b_down")


class Parameter(NamedTuple):
    """Describes a parameter to the module that makes it."""

    shape: tuple[int, ...]
    spec: P
    initializer: Callable[..., jax.Array]


def parameters(
    config: Config, axes: Axes, num_padded_experts: int | None = None
) -> dict[str, Parameter]:
    """Returns the parameters by name, sharded over those of `axes` that shard weights.

    Those of the experts have `num_padded_experts` as their first size, by default E.
    """
    hidden, size, num_experts = config.hidden_size, config.intermediate_size, config.num_experts
    count = num_padded_experts or num_experts
    expert, fsdp, tensor = map(spec_entry, (axes.expert, axes.fsdp, axes.tensor))
    rows = config.row_size  # the experts' own hidden size
    two, both = ((2,), (None,)) if config.is_gated else ((), ())

    kernel_init: Callable[..., jax.Array] = config.kernel_init
    matrix = functools.partial(_of_each_matrix, kernel_init, num_experts)
    bias_init: Callable[..., jax.Array] = config.bias_init
    if count > num_experts:
        bias_init = padded(bias_init, num_experts)

    found = {
        "router_kernel": Parameter((hidden, config.num_logits), P(None, None), config.kernel_init),
        "w_up": Parameter((count, rows, *two, size), P(expert, fsdp, *both, tensor), matrix(1)),
        "w_down": Parameter((count, size, rows), P(expert, tensor, fsdp), matrix(1)),
    }
    if config.quantized_only:
        del found["w_up"], found["w_down"]
    if config.use_bias:
        found["b_up"] = Parameter((count, *two, size), P(expert, *both, tensor), bias_init)
        found["b_down"] = Parameter((count, rows), P(expert, None), bias_init)
    if config.latent_size is not None:
        found["latent_in"] = Parameter((hidden, rows), P(fsdp, None), config.kernel_init)
        found["latent_out"] = Parameter((rows, hidden), P(None, fsdp), config.kernel_init)
    if config.shared_intermediate_size is not None:
        shared = config.shared_intermediate_size
        found["shared_w_up"] = Parameter((hidden, *two, shared), P(fsdp, *both, tensor), matrix(0))
        found["shared_w_down"] = Parameter((shared, hidden), P(tensor, fsdp), matrix(0))
    if config.shared_gate:
        found["shared_gate"] = Parameter((hidden, 1), P(None, None), config.kernel_init)
    if config.logits_bias:
        found["logits_bias"] = Parameter((config.num_logits,), P(), config.bias_init)
    return found


def specs_of(config: Config, axes: Axes, *, is_stack: bool) -> dict[str, Any]:
    """Returns the partition specs of the parameters, or of stacks of the experts' parameters."""
    specs = {name: param.spec for name, param in parameters(config, axes).items()}
    for name in OF_EXPERTS if is_stack else ():
        if name in specs:
            specs[name] = P(None, *specs[name])
    return specs


@functools.cache
def _of_each_matrix(
    initializer: Callable[..., jax.Array], num_experts: int, in_axis: int
) -> Callable[..., jax.Array]:
    """Initializes each expert's matrix, and gate and up, by themselves: [in, out]."""

    def initialize(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        others = tuple(size for axis, size in enumerate(shape[:-1]) if axis != in_axis)

        def one(key: jax.Array) -> jax.Array:
            return initializer(key, (shape[in_axis], shape[-1]), dtype)

        for _ in others:
            one = jax.vmap(one)
        if in_axis == 0:  # a shared expert's
            keys = jax.random.split(key, others) if others else key
            return jnp.moveaxis(one(keys), len(others), in_axis)
        values = one(keys_of_experts(key, others, num_experts))
        return without_padding(jnp.moveaxis(values, len(others), in_axis), num_experts)

    return initialize


def initialize(
    key: jax.Array, param: Parameter, dtype: DTypeLike, mesh: Mesh | AbstractMesh | None
) -> jax.Array:
    """Makes a parameter in its shards, so that no device ever holds the whole."""
    if mesh is None or mesh.abstract_mesh.manual_axes:
        return _initializer(param, jnp.dtype(dtype), None)(key)
    # vmap of jit loses a sharding over an abstract mesh.
    sharding = NamedSharding(compat.with_devices(mesh), param.spec)
    value = _initializer(param, jnp.dtype(dtype), sharding)(key)
    return reshard(mesh, param.spec, value)


@functools.lru_cache(maxsize=64)
def _initializer(
    param: Parameter, dtype: Any, sharding: NamedSharding | None
) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda key: param.initializer(key, param.shape, dtype), out_shardings=sharding)


def reshard(mesh: Mesh | AbstractMesh, spec: P, x: jax.Array) -> jax.Array:
    """Reshards x by the Explicit axes of `spec`; Auto axes are left to the compiler."""
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if AxisType.Explicit not in kinds.values():
        return x
    entries = (entry if isinstance(entry, tuple) else (entry,) for entry in spec)
    kept = (tuple(n for n in entry if kinds.get(n) == AxisType.Explicit) for entry in entries)
    return jax.sharding.reshard(x, NamedSharding(mesh, P(*(entry or None for entry in kept))))
