"""Programs of one call many times, for timing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax


def chain(call: Callable[..., Any], num_calls: int) -> Callable[..., Any]:
    """Makes one function of `num_calls` calls of `call`, one straight after another.

    All have the same arguments. The first, an array or a pytree, passes through barriers together
    with the last result: to the compiler it is another value for every call, and is there when the
    last call has ended. So calls are neither merged nor put side by side, and no kernel is between
    them. Two barriers, as XLA trims from a barrier what has no other reader, and with it the call
    that it comes from.

    Returns:
      The function, of `call`'s arguments: the last result.
    """

    def chained(x: Any, *others: Any) -> Any:
        return in_turn(call, x, [others] * num_calls)

    return chained


def in_turn(call: Callable[..., Any], x: Any, others: Sequence[tuple[Any, ...]]) -> Any:
    """Returns the result of the last of a call for each of `others`, as `chain` makes them."""
    result = call(x, *others[0])
    for arguments in others[1:]:
        arrays = jax.tree.leaves(result)
        for _ in range(2):
            x, *_ = lax.optimization_barrier((x, *arrays))
        result = call(x, *arguments)
    return result
