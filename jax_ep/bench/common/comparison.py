"""The measurements of a case: programs start side by side, then one after another is timed."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jax_ep.bench.common import timing
from jax_ep.bench.common.report import OURS

if TYPE_CHECKING:
    from jax_ep.bench.common.benchmark import Benchmark, Case, Provider, Started
    from jax_ep.bench.common.energy import Boards

Starting = concurrent.futures.Future["Started | list[Started]"]


class WallSeconds(dict[str, float]):
    """The seconds that the stages of a run took on the clock on the wall."""

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the time of a block."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self[name] = self.get(name, 0.0) + time.perf_counter() - start

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.items())


def total(records: list[dict[str, Any]]) -> WallSeconds:
    """Returns the sums over some cases."""
    sums: collections.Counter[str] = collections.Counter()
    for record in records:
        sums.update(record["wall_seconds"])
    return WallSeconds(sums)


@dataclasses.dataclass
class Comparison:
    """The measurements of one case, by the name of the provider."""

    benchmark: Benchmark
    case: Case
    problem: Any
    iterations: int
    measurements: dict[str, Any]
    wall: WallSeconds = dataclasses.field(default_factory=WallSeconds)
    started: dict[str, Started] = dataclasses.field(default_factory=dict[str, "Started"])
    _starting: dict[str, Starting] = dataclasses.field(default_factory=dict[str, Starting])

    def measure(self, provider: Provider) -> None:
        """Adds a round of a provider, or its error; after an error nothing is added."""
        name = provider.name
        if "error" in self.measurements.get(name, {}):
            return
        try:
            if name not in self.started:
                self.started[name] = self._start(provider)
                if name == OURS and self.benchmark.settling_seconds:
                    with self.wall.stage("settling"):
                        self._time(self.started[name], 1, self.benchmark.settling_seconds)
            started = self.started[name]
            with self.wall.stage("timing"):
                seconds = self._time(started, self.iterations, self.benchmark.warm_up_seconds)
        except Exception as error:  # noqa: BLE001  the other providers go on after any error
            text = " ".join(str(error).split())[:500]
            self.measurements[name] = {"error": f"{type(error).__name__}: {text}"}
            return
        measurement = self.measurements.setdefault(name, {"facts": started.facts, "rounds": []})
        times = timing.Times.of([s / started.repeats for s in seconds])
        measurement["rounds"].append(dataclasses.asdict(times))

    def measure_energy(self, boards: Boards, seconds: float) -> None:
        """Adds the energy of what was timed, one provider after another."""
        for name, started in self.started.items():
            if not self.benchmark.measures_energy(name):
                continue
            measurement = self.measurements[name]
            with self.wall.stage("energy"):
                try:
                    taken = boards.measure(started, seconds)
                except Exception as error:  # noqa: BLE001  as in `measure`
                    measurement["energy_error"] = f"{type(error).__name__}: {error}"[:500]
                else:
                    measurement["energy"] = dataclasses.asdict(taken)

    def _start(self, provider: Provider) -> Started:
        with self.wall.stage("programs"):
            future = self._starting.pop(provider.name, None)
            found = future.result() if future else provider.start(self.case, self.problem)
        if isinstance(found, list):
            with self.wall.stage("tuning"):
                started = self._fastest(found)
        else:
            started = found
        with self.wall.stage("first calls"):
            started.completion(started.call(started.arguments[0]))()
        with self.wall.stage("checks"):
            self.benchmark.check(started, provider.name, self.started.get(OURS))
        return started

    def _fastest(self, candidates: list[Started]) -> Started:
        if len(candidates) == 1:
            return candidates[0]
        return timing.fastest(
            candidates, lambda started: self._time(started, timing.TUNING_ITERATIONS, None)
        )

    @staticmethod
    def _time(started: Started, iterations: int, warm_up_seconds: float | None) -> list[float]:
        return timing.device_times(
            started.call, started.arguments, iterations, started.completion, warm_up_seconds
        )


def start_early(pending: list[tuple[Comparison, Provider]]) -> None:
    """Starts providers, each in a thread: XLA compiles without Python's lock. Keeps the errors."""

    def start(comparison: Comparison, provider: Provider) -> Any:
        begin = time.perf_counter()
        found = provider.start(comparison.case, comparison.problem)
        for started in found if isinstance(found, list) else [found]:
            started.facts["start_seconds"] = time.perf_counter() - begin
        return found

    if not pending:
        return
    with concurrent.futures.ThreadPoolExecutor(len(pending)) as pool:
        for comparison, provider in pending:
            future = pool.submit(start, comparison, provider)
            comparison._starting[provider.name] = future
