"""How a call is timed: one method for JAX and torch."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

ITERATIONS = 50
LONG_CALL_SECONDS = 0.05
LONG_CALL_ITERATIONS = 10
BURST_SECONDS = 0.01
WARM_UP_SECONDS = 0.25
TUNING_ITERATIONS = 5

# Given the result of the last call of a burst, makes what waits for the burst to end.
Completion = Callable[[Any], Callable[[], object]]


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of a call on the device, over iterations."""

    mean: float
    median: float
    minimum: float
    maximum: float
    iterations: int

    @staticmethod
    def of(seconds: Sequence[float]) -> Times:
        """Their summary."""
        return Times(
            statistics.fmean(seconds),
            statistics.median(seconds),
            min(seconds),
            max(seconds),
            len(seconds),
        )


def jax_completion(result: Any) -> Callable[[], object]:
    """The `Completion` of JAX's results."""
    return functools.partial(jax.block_until_ready, result)


def bursts(
    call: Callable[[Any], Any], argument_sets: Sequence[Any], completion: Completion
) -> Callable[[int], Callable[[], object]]:
    """Returns what enqueues so many calls with arguments in turn, and returns the wait for them."""
    rotation = itertools.cycle(argument_sets)

    def burst(calls: int) -> Callable[[], object]:
        for _ in range(calls):
            result = call(next(rotation))
        return completion(result)

    return burst


def fastest[T](candidates: Iterable[T], seconds: Callable[[T], list[float]]) -> T:
    """Returns the candidate with the least median. Raises the first error if all have failed."""
    times: list[tuple[float, T]] = []
    errors: list[Exception] = []
    for candidate in candidates:
        try:
            median = Times.of(seconds(candidate)).median
        except Exception as error:  # noqa: BLE001  a configuration may not fit the shape
            errors.append(error.with_traceback(None))  # which would keep the operands alive
        else:
            times.append((median, candidate))
    if not times:
        raise errors[0]
    return min(times, key=lambda pair: pair[0])[1]


def device_times(
    call: Callable[[Any], Any],
    argument_sets: Sequence[Any],
    iterations: int,
    completion: Completion = jax_completion,
    warm_up_seconds: float | None = None,
) -> list[float]:
    """Seconds that a call takes on the device, once for each iteration.

    An iteration is a burst of at least 10 ms of calls, and its time that from the end of the
    previous burst to its own end, over its number of calls. The next burst is always enqueued
    before a burst is waited for, so the device is never idle: neither launching nor waiting is in
    the time, unless launching takes longer than computing, which is then what a user would see as
    well. Gaps between the kernels of one call count. The clock is the host's, so that it is the
    same for every framework: JAX shows neither its streams nor events on them, and what CUPTI says
    of kernels leaves out the gaps.

    Calls of more than 50 ms are waited for one by one: launching is nothing beside them, and two at
    once may not fit into memory (lax.ragged_dot's weight gradient takes 44 GiB for 64 groups).

    Args:
      call: enqueues the work on the device and returns its result. Compiled and run once before.
      argument_sets: arguments of successive calls, used in turn; together larger than the L2 cache.
      iterations: how many; at most `LONG_CALL_ITERATIONS` of long calls.
      completion: how to wait for a result.
      warm_up_seconds: of calls that are not timed; None for `WARM_UP_SECONDS`.
    """
    if warm_up_seconds is None:
        warm_up_seconds = WARM_UP_SECONDS
    burst = bursts(call, argument_sets, completion)

    def timed(calls: int) -> float:
        start = time.perf_counter()
        burst(calls)()
        return (time.perf_counter() - start) / calls

    burst(1)()
    estimate = min(timed(1), timed(1))
    if estimate > LONG_CALL_SECONDS:
        warm_up = math.ceil(warm_up_seconds / estimate)
        iterations = min(iterations, LONG_CALL_ITERATIONS)
        return [timed(1) for _ in range(warm_up + iterations)][warm_up:]

    estimate = timed(2)
    calls = max(1, math.ceil(BURST_SECONDS / estimate))
    warm_up = max(1, math.ceil(warm_up_seconds / (estimate * calls)))
    seconds = []
    running = burst(calls)
    ended = time.perf_counter()
    for _ in range(warm_up + iterations):
        following = burst(calls)
        running()
        now = time.perf_counter()
        seconds.append((now - ended) / calls)
        ended, running = now, following
    running()
    return seconds[warm_up:]
