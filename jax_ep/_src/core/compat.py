"""Every seam between JAX versions. Nothing else in jax_ep knows about versions."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import partial_eval
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

Aval = Any  # jax.core.ShapedArray: the class has no public name to annotate with.


def define_dead_code_rule(
    primitive: Primitive, rule: Callable[[list[bool], Any], tuple[list[bool], Any]]
) -> None:
    """Defines by rule(used results, equation) what is left of a call: used operands, equation.

    JAX 0.12 says which operands are live, too, before the equation.
    """
    partial_eval.dce_rules[primitive] = lambda used, *others: rule(used, others[-1])


def varying_axes(x: jax.Array) -> frozenset[str]:
    """The manual mesh axes over which `x` differs; empty under ``check_vma=False``."""
    return frozenset(jax.typeof(x).mat.varying)


def tracks_varying_axes(axes: Iterable[str]) -> bool:
    """Whether `varying_axes` tells anything here: with ``check_vma=True``, the default."""
    varying: list[bool] = []
    # Read inside: outside, JAX forgets the mesh of a shard_map over some of its axes.
    jax.eval_shape(lambda: varying.append(bool(varying_axes(jax.lax.axis_index(tuple(axes))))))
    return varying[0]


def over_shards(function: Callable[..., Any], mapped: list[Any]) -> Callable[..., Any]:
    """`function` of arrays and whole ones, for each shard of the leading dimension of `mapped`.

    Auto and manual axes shard no dimension of a type, so that only Explicit ones count here.
    """
    avals = [jax.typeof(leaf) for leaf in jax.tree.leaves(mapped)]
    names = next(filter(None, (explicit_axes(aval, slice(1)) for aval in avals)), ())
    if not names:
        return function
    mesh = avals[0].sharding.mesh
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=(PartitionSpec(names), PartitionSpec()),
        out_specs=PartitionSpec(names),
        axis_names=set(names),
        check_vma=not mesh.manual_axes or tracks_varying_axes(mesh.manual_axes),
    )


def vary_over(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """`x` typed as varying over `axes` too. Its transpose is a psum over the axes added."""
    missing = tuple(sorted(frozenset(axes) - varying_axes(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def vary_together[T](tree: T, axes: Iterable[str] = ()) -> T:
    """Every array of `tree`, varying over `axes` and over what any of them varies over."""
    union = frozenset(axes).union(*(varying_axes(leaf) for leaf in jax.tree.leaves(tree)))
    return _batched_together(jax.tree.map(lambda leaf: vary_over(leaf, union), tree))


def _batched_together[T](tree: T) -> T:
    """The floats of `tree` are all elements of a batch that `jax.vmap` splits over a manual axis.

    JAX sums the gradient of an argument of a `custom_vjp` that is none over the batch, but not over
    the axis. That of an element is right, and so is that of an addition, which XLA removes.
    """
    axes = vmapped_manual_axes()
    if not (axes and tracks_varying_axes(axes)):
        return tree

    def is_element(x: jax.Array) -> bool:
        try:  # JAX hides the axis in its type
            jax.lax.pcast(x, tuple(axes), to="varying")
        except ValueError:
            return True
        return False

    element = next((x for x in jax.tree.leaves(tree) if x.size and is_element(x)), None)
    if element is None:
        return tree
    zero = element.ravel()[0].astype(jax.numpy.int32) * 0

    def batched(x: jax.Array) -> jax.Array:
        is_float = jax.numpy.issubdtype(x.dtype, jax.numpy.floating) and x.dtype.itemsize > 1
        return x + zero.astype(x.dtype) if is_float and not is_element(x) else x

    return jax.tree.map(batched, tree)


def struct_like(x: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """A shape and a dtype that vary over the same axes as `x`."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(x).mat)


def aval_like(aval: Aval, shape: tuple[int, ...], dtype: Any) -> Aval:
    """An abstract value that varies over the same axes as `aval`, replicated over all others."""
    sharding = aval.sharding.update(spec=PartitionSpec(*(None,) * len(shape)))
    return aval.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)


def explicit_axes(aval: Aval, dims: slice = slice(None)) -> tuple[str, ...]:
    """The Explicit mesh axes over which `aval` is sharded, in some of its dimensions."""
    mesh = aval.sharding.mesh
    if mesh.empty:
        return ()
    explicit = {
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Explicit
    }
    used: list[str] = []
    for entry in aval.sharding.spec[dims]:
        for name in entry if isinstance(entry, tuple) else (entry,):
            if name in explicit:
                used.append(name)
    return tuple(used)


def without_tangents[T](tree: T) -> T:
    """The results of a `jax.custom_vjp`, of which integers have no tangents of type float0.

    Under ``vmap(spmd_axis_name=...)`` the zeros that JAX makes as their cotangents in a later
    `custom_vjp` lack that axis among those that they vary over, and JAX refuses them. Operations on
    bits have no derivative, and XLA removes them.
    """
    if not vmapped_axes():
        return tree

    def cut(x: jax.Array) -> jax.Array:
        if x.dtype == jax.numpy.bool_:
            return jax.lax.bitwise_not(jax.lax.bitwise_not(x))
        if not jax.numpy.issubdtype(x.dtype, jax.numpy.integer):
            return x
        unsigned = jax.numpy.dtype(f"uint{8 * x.dtype.itemsize}")
        other = jax.numpy.dtype(f"int{8 * x.dtype.itemsize}") if x.dtype == unsigned else unsigned
        bits = jax.lax.bitcast_convert_type(x, other)
        return jax.lax.bitcast_convert_type(bits, x.dtype)

    return jax.tree.map(cut, tree)


def without_gradients[T](tree: T) -> T:
    """Arrays for which a `custom_vjp` has no cotangents, as `without_tangents` for integers."""
    return jax.lax.stop_gradient(tree) if vmapped_axes() else tree


def broadcast_over(x: jax.Array, batch: jax.Array, dim: int) -> jax.Array:
    """`x` for each element of `batch`, sharded over the Explicit axes that shard its `dim`."""
    size, names = batch.shape[dim], explicit_axes(jax.typeof(batch), slice(dim, dim + 1))
    if not names:
        return jax.numpy.broadcast_to(x, (size, *x.shape))
    sharding = jax.typeof(x).sharding
    spec = PartitionSpec(names, *sharding.spec)
    return jax.lax.broadcast(x, (size,), out_sharding=sharding.update(spec=spec))


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


def vmapped_axes() -> frozenset[str]:
    """The mesh axes over which a surrounding `jax.vmap` splits its elements.

    These are its ``spmd_axis_name``, and the Explicit axes that shard the mapped dimension.
    """
    from jax._src import core  # no public name

    return frozenset(core.get_axis_env().spmd_axis_names) | vmapped_explicit_axes()


def vmapped_manual_axes() -> frozenset[str]:
    """Those of `vmapped_axes` that are manual: inside of a `jax.shard_map` under the `jax.vmap`."""
    return vmapped_axes().intersection(jax.sharding.get_abstract_mesh().manual_axes)


def checkpoint(function: Callable[..., Any]) -> Callable[..., Any]:
    """`jax.checkpoint`, but where `jax.vmap` splits its elements over a manual axis.

    With ``check_vma=True`` JAX's batching rule forgets the axis, and refuses the program.
    """
    axes = vmapped_manual_axes()
    return function if axes and tracks_varying_axes(axes) else jax.checkpoint(function)


def vmapped_explicit_axes() -> frozenset[str]:
    """Those of `vmapped_axes` that are Explicit. A `jax.shard_map` there must leave them out."""
    from jax._src import core  # no public name

    return frozenset(core.get_axis_env().explicit_mesh_axis_names)


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
    context = _context_mesh()
    if context is None or context.abstract_mesh != mesh.abstract_mesh:
        return mesh
    return context


def devices_of(mesh: Mesh | AbstractMesh) -> Any:
    """The mesh's devices, an array of its shape; None for one whose devices are not known here."""
    if isinstance(mesh, Mesh):
        return mesh.devices
    context = _context_mesh()  # whose axes a shard_map may have made manual since
    if context is None or dict(context.shape) != dict(mesh.shape):
        return None
    return context.devices


def devices_of_call(ctx: Any) -> Any:
    """Those of the mesh in which a call is lowered, as `devices_of`.

    JAX does not lower a program again for another mesh of the same shape, if it takes the mesh of
    `jax.set_mesh`: then they are those of the first one.
    """
    mesh = getattr(ctx.module_context.axis_context, "mesh", None)
    return None if mesh is None else devices_of(mesh)


def _context_mesh() -> Mesh | None:
    """The mesh of `jax.set_mesh`; None without one."""
    try:
        from jax._src.mesh import get_concrete_mesh  # jax.sharding.get_mesh refuses inside vmap
    except ImportError:
        return None
    context = get_concrete_mesh()
    return None if context.empty else context


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


def known_axes(value: Any) -> frozenset[str]:
    """The mesh axes over which an array or a tracer is known to be sharded."""
    if isinstance(value, jax.core.Tracer):
        found = frozenset(explicit_axes(jax.typeof(value)))
        return found | known_axes(whole) if (whole := concrete(value)) is not None else found
    sharding = getattr(value, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return frozenset()
    entries = (entry if isinstance(entry, tuple) else (entry,) for entry in sharding.spec)
    return frozenset(name for entry in entries for name in entry if isinstance(name, str))


def is_on_one_device(value: Any) -> bool:
    """Whether an array, of numpy or of JAX, is on at most one device."""
    sharding = getattr(value, "sharding", None)
    return sharding is None or len(sharding.device_set) == 1
