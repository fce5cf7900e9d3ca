"""The checks of arguments. Each raises what was given, what is expected and what to do.

A check returns its argument in the form in which the operation goes on with it. The first argument
of each is the operation's name, for the message.
"""

from jax_ep._src.core.checks.arrays import (
    accumulator,
    array,
    group_sizes,
    ids_dtype,
    known_sizes,
    matrix_dtype,
    out_dtype,
    rows,
    shape,
    topk_ids,
    weights,
)
from jax_ep._src.core.checks.context import (
    expert_axis,
    implementation,
    own_axis,
    replicated,
)
from jax_ep._src.core.checks.values import (
    capacity,
    dtype,
    float_dtype,
    integer,
    num_chunks,
    num_experts,
    num_sms,
    remat,
)

__all__ = [
    "accumulator",
    "array",
    "capacity",
    "dtype",
    "expert_axis",
    "float_dtype",
    "group_sizes",
    "ids_dtype",
    "implementation",
    "integer",
    "known_sizes",
    "matrix_dtype",
    "num_chunks",
    "num_experts",
    "num_sms",
    "out_dtype",
    "own_axis",
    "remat",
    "replicated",
    "rows",
    "shape",
    "topk_ids",
    "weights",
]
