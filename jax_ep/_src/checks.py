"""The checks of arguments. Each raises what was given, what is expected and what to do.

A check returns its argument in the form in which the operation goes on with it. The first argument
of each is the operation's name, for the message.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep._src import compat, plan, weighted
from jax_ep._src.errors import ArgumentError, DtypeError
from jax_ep._src.mesh import AxisName, ExpertAxis
from jax_ep._src.plan import Plan
from jax_ep._src.quantized import Quantized
from jax_ep._src.recipe import QuantizedWeights

ROW_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
IMPLEMENTATIONS = ("cuda", "xla")
INT32 = np.iinfo(np.int32)

# ---- where a call stands


def expert_axis(operation: str, axis_name: AxisName) -> ExpertAxis:
    """The expert axis named `axis_name` in the `shard_map` that is being traced."""
    mesh = jax.sharding.get_abstract_mesh()
    names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
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


def plan_axis(operation: str, plan: Plan) -> ExpertAxis:
    """The expert axis of a plan, which belongs to the mesh in which it was made."""
    if not isinstance(plan, Plan):
        raise DtypeError(
            f"jax_ep.{operation}: plan is a {type(plan).__name__}; expected the jax_ep.Plan that "
            "dispatch returned. Give dispatched.plan."
        )
    axis = expert_axis(operation, plan.axis_name) if plan.axis_name else own_axis()
    if axis.size != plan.num_ranks:
        raise ArgumentError(
            f"jax_ep.{operation}: axis {plan.axis_name!r} has {axis.size} ranks here; expected "
            f"{plan.num_ranks}, as in the plan. Use the plan in the mesh in which it was made."
        )
    return axis


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


# ---- Python values

ADVICE = {
    "num_sms": "Use None to let jax_ep choose.",
    "num_comm_sms": "Use None to let jax_ep choose.",
    "row_align": "Use 1 for no padding.",
    "recv_capacity": "Use None to drop nothing, or capacity_factor for a multiple of T * K rows.",
    "num_chunks": "Use 1 for a single call.",
    "num_experts": "Give E, the experts of all ranks.",
}


def integer(operation: str, name: str, value: Any, least: int = 1) -> int:
    """An int that is known while tracing."""
    advice = ADVICE.get(name, "Sizes are static: give a Python int.")
    try:
        number = operator.index(value)
    except TypeError as error:
        raise DtypeError(
            f"jax_ep.{operation}: {name}={value!r} is a {type(value).__name__}; expected an int. "
            f"{advice}"
        ) from error
    if number < least:
        raise ArgumentError(
            f"jax_ep.{operation}: {name}={number}; expected {least} or more. {advice}"
        )
    return number


def dtype(operation: str, name: str, value: Any) -> np.dtype[Any]:
    """A dtype that numpy knows."""
    try:
        return jnp.dtype(value)
    except TypeError as error:
        raise DtypeError(
            f"jax_ep.{operation}: {name}={value!r}; expected a dtype. Give one such as "
            "jnp.bfloat16."
        ) from error


def num_sms(operation: str, value: int | None, name: str = "num_sms") -> int:
    """The attribute's form: 0 lets the launch code choose."""
    return 0 if value is None else integer(operation, name, value)


def num_experts(operation: str, num_experts: int | None, axis: ExpertAxis) -> int:
    """A multiple of the number of ranks."""
    num_experts = integer(operation, "num_experts", num_experts, least=0)
    if num_experts < 1 or num_experts % axis.size:
        padded = max(1, -(-num_experts // axis.size)) * axis.size
        raise ArgumentError(
            f"jax_ep.{operation}: num_experts={num_experts} does not divide over the {axis.size} "
            f"ranks of axis {axis.name!r}; expected a positive multiple of {axis.size}. Pad the "
            f"expert weights to {padded} experts; an id that the router never gives costs nothing."
        )
    return num_experts


def num_rows(
    operation: str,
    ids_shape: tuple[int, ...],
    axis: ExpertAxis,
    num_experts: int,
    *,
    row_align: int,
    recv_capacity: int | None,
    capacity_factor: float | None,
) -> int:
    """M, the rows that a rank can receive."""
    row_align = integer(operation, "row_align", row_align)
    capacity(operation, recv_capacity, capacity_factor)
    if recv_capacity is not None:
        return operator.index(recv_capacity)
    num_tokens, top_k = ids_shape
    return plan.num_rows(
        num_tokens, top_k, axis.size, num_experts // axis.size, row_align, capacity_factor
    )


def capacity(
    operation: str, recv_capacity: int | None = None, capacity_factor: float | None = None
) -> None:
    """Raises unless at most one is given, and that one makes sense."""
    if recv_capacity is not None and capacity_factor is not None:
        raise ArgumentError(
            f"jax_ep.{operation}: recv_capacity={recv_capacity!r} and capacity_factor="
            f"{capacity_factor!r} are both given; expected at most one. Give the rows of a rank, "
            "or a multiple of T * K."
        )
    if recv_capacity is not None:
        integer(operation, "recv_capacity", recv_capacity)
    if capacity_factor is None:
        return
    is_number = isinstance(capacity_factor, int | float | np.number)
    if not is_number or not 0 < capacity_factor < math.inf:
        raise ArgumentError(
            f"jax_ep.{operation}: capacity_factor={capacity_factor!r}; expected a positive number. "
            "Give a factor such as 1.25, or None to drop nothing."
        )


def num_chunks(operation: str, num_chunks: int, num_tokens: int) -> None:
    """Raises unless the tokens divide into so many chunks."""
    integer(operation, "num_chunks", num_chunks)
    if num_chunks > max(1, num_tokens) or num_tokens % num_chunks:
        raise ArgumentError(
            f"jax_ep.{operation}: num_chunks={num_chunks} with {num_tokens} tokens per rank; "
            "expected a divisor of the tokens. Pad the tokens (ids of -1 cost nothing), or choose "
            "another number."
        )


def remat(operation: str, remat: str | None) -> None:
    """Raises unless it is a known way to save memory."""
    if remat not in (None, "dispatch", "experts"):
        raise ArgumentError(
            f"jax_ep.{operation}: remat={remat!r}; expected 'dispatch', 'experts' or None. For "
            "other policies wrap the layer in jax.checkpoint with jax_ep.REMAT_NAMES."
        )


# ---- arrays


def array(operation: str, name: str, value: Any) -> None:
    """Raises if `value` has no shape and dtype."""
    if not (hasattr(value, "shape") and hasattr(value, "dtype")):
        raise DtypeError(
            f"jax_ep.{operation}: {name} is a {type(value).__name__}; expected an array. "
            f"{_from_type(name, value)}"
        )


def _from_type(name: str, value: Any) -> str:
    """What to do about a value that is no array."""
    if isinstance(value, Quantized):
        return "Use jax_ep.quant.dequantize, or give the array before it was quantized."
    if isinstance(value, QuantizedWeights):
        return "Give the float weights here, and these as quantized_weights or quantized_rhs."
    return f"Convert it with jnp.asarray({name})."


def shape(operation: str, name: str, value: jax.Array, expected: tuple[int | str, ...]) -> None:
    """Compares with `expected`, in which a string stands for any size and is its name."""
    array(operation, name, value)
    if any(jax.export.is_symbolic_dim(size) for size in value.shape):
        raise ArgumentError(
            f"jax_ep.{operation}: {name} has shape {value.shape}, which is symbolic; expected "
            "sizes that are known while tracing. Export once for each size, and pad to the next."
        )
    fits = len(value.shape) == len(expected) and all(
        isinstance(want, str) or want == have
        for have, want in zip(value.shape, expected, strict=True)
    )
    if not fits:
        wanted = ", ".join(str(size) for size in expected)
        raise ArgumentError(
            f"jax_ep.{operation}: {name} has shape {value.shape}; expected [{wanted}]. "
            "Inside shard_map these are the shapes of one rank."
        )


def rows(operation: str, name: str, value: jax.Array, expected: tuple[int | str, ...]) -> None:
    """Raises if these are not rows of one of the dtypes that rows can have."""
    shape(operation, name, value, expected)
    if value.dtype not in ROW_DTYPES:
        dtypes = ", ".join(str(jnp.dtype(d)) for d in ROW_DTYPES)
        raise DtypeError(
            f"jax_ep.{operation}: {name} has dtype {value.dtype}; expected one of {dtypes}. "
            f"Cast it with {name}.astype(...)."
        )


def weights(
    operation: str, name: str, value: jax.Array, expected: tuple[int | str, ...]
) -> jax.Array:
    """Weights of any float dtype as float32."""
    shape(operation, name, value, expected)
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise DtypeError(
            f"jax_ep.{operation}: {name} has dtype {value.dtype}; expected a float dtype. "
            f"Cast it with {name}.astype(jnp.float32)."
        )
    return value.astype(jnp.float32)


def topk_ids(operation: str, topk_ids: jax.Array, num_tokens: int) -> None:
    """Raises if these are not the experts of so many tokens."""
    shape(operation, "topk_ids", topk_ids, (num_tokens, "top_k"))
    if topk_ids.shape[1] < 1:
        raise ArgumentError(
            f"jax_ep.{operation}: topk_ids has shape {topk_ids.shape}; expected at least one "
            "expert per token. Mark tokens that have none by an id of -1."
        )
    if topk_ids.dtype != jnp.int32:
        raise DtypeError(
            f"jax_ep.{operation}: topk_ids has dtype {topk_ids.dtype}; expected int32. "
            "Cast it with topk_ids.astype(jnp.int32)."
        )


def unweighted(operation: str, y: jax.Array, row_weights: jax.Array | None) -> None:
    """Raises if `y` carries its row weights already, so that they would count twice."""
    if row_weights is not None and weighted.is_marked(y):
        raise ArgumentError(
            f"jax_ep.{operation}: y is an output of grouped_mlp that was given row weights, and "
            "row_weights are given here again; expected them once. Give None here, or give "
            "grouped_mlp none."
        )


def group_sizes(
    operation: str, group_sizes: jax.Array, num_groups: int | str = "groups"
) -> jax.Array:
    """Sizes of any integer dtype as int32; what does not fit is clipped, never wrapped."""
    shape(operation, "group_sizes", group_sizes, (num_groups,))
    if group_sizes.shape[0] < 1:
        raise ArgumentError(
            f"jax_ep.{operation}: group_sizes has shape {group_sizes.shape}; expected at least "
            "one group. Give one size for each matrix."
        )
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise DtypeError(
            f"jax_ep.{operation}: group_sizes has dtype {group_sizes.dtype}; expected an integer "
            "dtype. Cast it with group_sizes.astype(jnp.int32)."
        )
    bounds = jnp.iinfo(group_sizes.dtype)
    if bounds.max > INT32.max:
        # jax.numpy would wrap a numpy array of 64 bits before it clips it.
        clip = np.clip if isinstance(group_sizes, np.ndarray) else jnp.clip
        low, high = max(bounds.min, INT32.min), INT32.max
        group_sizes = clip(group_sizes, *np.array([low, high], group_sizes.dtype))
    return group_sizes.astype(jnp.int32)


def matrix_dtype(
    operation: str, name: str, matrix: jax.Array, rows_name: str, rows: jax.Array
) -> None:
    """Raises if `rows` cannot be multiplied by `matrix`."""
    if matrix.dtype not in (rows.dtype, jnp.float32):
        raise DtypeError(
            f"jax_ep.{operation}: {name} has dtype {matrix.dtype} and {rows_name} {rows.dtype}; "
            f"expected {name} in {rows_name}'s dtype or float32. Cast it with "
            f"{name}.astype({rows.dtype})."
        )


def out_dtype(operation: str, lhs: jax.Array, preferred_element_type: Any) -> np.dtype[Any]:
    """The dtype of a product's result."""
    wanted = lhs.dtype if preferred_element_type is None else preferred_element_type
    result = dtype(operation, "preferred_element_type", wanted)
    if result not in (lhs.dtype, jnp.float32):
        raise DtypeError(
            f"jax_ep.{operation}: preferred_element_type={result} with lhs in {lhs.dtype}; "
            f"expected {lhs.dtype} or float32. Cast the result instead."
        )
    return result


def accumulator(
    operation: str,
    accumulator: jax.Array,
    expected: tuple[int, ...],
    preferred_element_type: Any,
) -> None:
    """Raises if a result of shape `expected` cannot be added to it."""
    shape(operation, "accumulator", accumulator, expected)
    if accumulator.dtype != jnp.float32:
        raise DtypeError(
            f"jax_ep.{operation}: accumulator has dtype {accumulator.dtype}; expected float32. "
            "Cast it with accumulator.astype(jnp.float32)."
        )
    if preferred_element_type is not None and jnp.dtype(preferred_element_type) != jnp.float32:
        raise DtypeError(
            f"jax_ep.{operation}: preferred_element_type={jnp.dtype(preferred_element_type)} with "
            "an accumulator; expected float32 or None. Cast the result instead."
        )
