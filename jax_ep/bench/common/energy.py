"""Energy of calls, by the energy counters of the GPU boards (NVML).

A board's sensor samples its power for a quarter of the time, with a period of about 0.1 s. Calls
whose power changes with a similar period would be seen in one phase of it. So calls run for
seconds, several times, each after a random pause.
"""

from __future__ import annotations

import dataclasses
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from jax_ep.bench.common import timing
from jax_ep.bench.common.report import Figure

if TYPE_CHECKING:
    from jax_ep.bench.common.benchmark import Started

FIGURES = (Figure("joules", "J", ".3f"), Figure("watts", "W per GPU", ".0f"))
PHASES = 3
LONGEST_PAUSE_SECONDS = 0.2
IDLE_SECONDS = 3.0


@dataclasses.dataclass(frozen=True)
class Energy:
    """The energy of a call, of all boards together, and the mean power of one.

    Attributes:
      joules: per call, the mean over phases.
      watts: of one board, likewise.
      phases: the joules per call in each.
    """

    joules: float
    watts: float
    phases: list[float]


class Boards:
    """The boards that JAX uses. Raises ModuleNotFoundError without nvidia-ml-py."""

    def __init__(self, count: int) -> None:
        import pynvml

        pynvml.nvmlInit()
        self._nvml = pynvml
        self._handles = [self._handle(name) for name in _visible(count)]

    def _handle(self, name: str) -> Any:
        if name.isdecimal():
            return self._nvml.nvmlDeviceGetHandleByIndex(int(name))
        return self._nvml.nvmlDeviceGetHandleByUUID(name)

    def joules(self) -> float:
        """Returns what all have taken since the driver was loaded."""
        energy = self._nvml.nvmlDeviceGetTotalEnergyConsumption
        return sum(energy(handle) for handle in self._handles) / 1e3

    def idle_watts(self, seconds: float = IDLE_SECONDS) -> float:
        """Rests, and returns the mean power of a board meanwhile."""
        time.sleep(seconds)  # until the clocks are low
        start, before = time.perf_counter(), self.joules()
        time.sleep(seconds)
        return (self.joules() - before) / (time.perf_counter() - start) / len(self._handles)

    def measure(self, started: Started, seconds: float) -> Energy:
        """Runs a call for so many seconds in each of some phases."""
        shuffle = random.Random(0)
        joules, watts = [], []
        for _ in range(PHASES):
            time.sleep(shuffle.uniform(0, LONGEST_PAUSE_SECONDS))
            start, before = time.perf_counter(), self.joules()
            calls = repeat(started.call, started.arguments, seconds, started.completion)
            taken = self.joules() - before
            watts.append(taken / (time.perf_counter() - start) / len(self._handles))
            joules.append(taken / (calls * started.repeats))
        return Energy(statistics.fmean(joules), statistics.fmean(watts), joules)


def _visible(count: int) -> list[str]:
    """Returns NVML's names of JAX's devices: CUDA_VISIBLE_DEVICES has indices or UUIDs."""
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    names = [name for name in named if name] or [str(index) for index in range(count)]
    return names[:count]


def repeat(
    call: Callable[[Any], Any],
    argument_sets: Sequence[Any],
    seconds: float,
    completion: timing.Completion,
) -> int:
    """Calls for so long, the device never idle, and returns how often."""
    burst = timing.bursts(call, argument_sets, completion)
    start = time.perf_counter()
    burst(1)()
    calls = max(1, round(timing.BURST_SECONDS / (time.perf_counter() - start)))
    done = 1 + calls
    running = burst(calls)
    while time.perf_counter() - start < seconds:
        following = burst(calls)
        done += calls
        running()
        running = following
    running()
    return done
