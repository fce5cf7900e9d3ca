"""Every seam between JAX versions. Nothing else in jax_ep knows about versions."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

Aval = Any  # jax.core.ShapedArray: the class has no public name to annotate with.


def varying_axes(x: jax.Array) -> frozenset[str]:
    """The manual mesh axes over which `x` differs; empty under ``check_vma=False``."""
    return frozenset(jax.typeof(x).mat.varying)


def tracks_varying_axes(axes: Iterable[str]) -> bool:
    """Whether `varying_axes` tells anything here: with ``check_vma=True``, the default."""
    varying: list[bool] = []
    # Read inside: outside, JAX forgets the mesh of a shard_map over some of its axes.
    jax.eval_shape(lambda: varying.append(bool(varying_axes(jax.lax.axis_index(tuple(axes))))))
    return varying[0]


def vary_over(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """`x` typed as varying over `axes` too. Its transpose is a psum over the axes added."""
    missing = tuple(sorted(frozenset(axes) - varying_axes(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def vary_together[T](tree: T, axes: Iterable[str] = ()) -> T:
    """Every array of `tree`, varying over `axes` and over what any of them varies over."""
    union = frozenset(axes).union(*(varying_axes(leaf) for leaf in jax.tree.leaves(tree)))
    return jax.tree.map(lambda leaf: vary_over(leaf, union), tree)


def struct_like(x: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """A shape and a dtype that vary over the same axes as `x`."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(x).mat)


def aval_like(aval: Aval, shape: tuple[int, ...], dtype: Any) -> Aval:
    """An abstract value that varies over the same axes as `aval`, replicated over all others."""
    sharding = aval.sharding.update(spec=PartitionSpec(*(None,) * len(shape)))
    return aval.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)


def explicit_axes(aval: Aval) -> tuple[str, ...]:
    """The Explicit mesh axes over which `aval` is sharded."""
    mesh = aval.sharding.mesh
    if mesh.empty:
        return ()
    explicit = {
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Explicit
    }
    used: list[str] = []
    for entry in aval.sharding.spec:
        for name in entry if isinstance(entry, tuple) else (entry,):
            if name in explicit:
                used.append(name)
    return tuple(used)


def looks_for_nan() -> bool:
    """Whether JAX stops at NaN: then rows that nothing may read are zeros."""
    return bool(jax.config.jax_debug_nans)


def join_last_axes(x: jax.Array) -> jax.Array:
    """[..., A, B] as [..., A * B], in which no Explicit axis shards A * B."""
    shape = (*x.shape[:-2], x.shape[-2] * x.shape[-1])
    aval = jax.typeof(x)
    if not explicit_axes(aval):
        return x.reshape(shape)
    sharding = aval.sharding.update(spec=PartitionSpec(*aval.sharding.spec[:-2], None))
    return jax.lax.reshape(x, shape, out_sharding=sharding)


def is_partitioned(ctx: Any) -> bool:
    """Whether XLA partitions the program that is lowered here over several devices."""
    context = ctx.module_context.axis_context
    if (manual := getattr(context, "manual_axes", None)) is None:
        return (context.num_devices or 1) > 1
    return any(size > 1 for name, size in context.mesh.shape.items() if name not in manual)


# ---- which mesh and devices


def with_block_mesh() -> Mesh | None:
    """The mesh of a ``with mesh:`` block, which JAX deprecates in favor of `jax.set_mesh`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            from jax.interpreters.pxla import thread_resources
        except ImportError:  # then there are no such blocks any more
            return None
    mesh = thread_resources.env.physical_mesh
    return None if mesh.empty else mesh


def with_devices(mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
    """The mesh of `jax.set_mesh` with its devices, if `mesh` is that one."""
    try:
        from jax._src.mesh import get_concrete_mesh  # jax.sharding.get_mesh refuses inside vmap
    except ImportError:
        return mesh
    context = get_concrete_mesh()
    return context if context.abstract_mesh == mesh.abstract_mesh else mesh


def concrete(value: Any) -> Any:
    """`value`, or the value behind a tracer of an eager derivative; None for other tracers."""
    if not isinstance(value, jax.core.Tracer):
        return value
    from jax._src import core  # no public name

    return core.to_concrete_value(value)


def mesh_of(value: Any) -> Mesh | AbstractMesh | None:
    """The mesh that an array or a tracer is sharded over; None if it is not known."""
    if isinstance(value, jax.core.Tracer):
        mesh = jax.typeof(value).sharding.mesh
        return None if mesh.empty else mesh
    sharding = getattr(value, "sharding", None)
    return sharding.mesh if isinstance(sharding, NamedSharding) else None


def is_on_one_device(value: Any) -> bool:
    """Whether an array, of numpy or of JAX, is on at most one device."""
    sharding = getattr(value, "sharding", None)
    return sharding is None or len(sharding.device_set) == 1
