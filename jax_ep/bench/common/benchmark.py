"""The parts of a benchmark: cases, providers, and the configuration of both.

A provider is one implementation that is measured: jax_ep, or a baseline. A `Benchmark` configures
the cases, the providers, and the figures that follow from the times.
"""

from __future__ import annotations

import abc
import argparse
import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import jax

from jax_ep.bench.common import report, timing
from jax_ep.bench.common.report import OURS, Figure, Record

# Providers without which a case does not count; of several in one tuple, one is enough.
Required = tuple[tuple[str, ...], ...]


@dataclasses.dataclass(frozen=True)
class Started:
    """A compiled operation that is ready to be timed.

    Attributes:
      call: enqueues it with one of `arguments` and returns its result.
      arguments: for calls in turn.
      completion: how to wait for a result.
      to_jax: the result as a JAX array.
      repeats: how often one call does the operation.
      facts: JSON values for the report.
    """

    call: Callable[[Any], Any]
    arguments: list[Any]
    completion: timing.Completion = timing.jax_completion
    to_jax: Callable[[Any], jax.Array] = lambda result: result
    repeats: int = 1
    facts: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])


@dataclasses.dataclass(frozen=True)
class Case:
    """One comparison: all providers do this.

    Attributes:
      operation: one of the benchmark's.
      shape: a dataclass of ints, of the benchmark's type.
      variant: one of the benchmark's.
      chained: how many calls, each waiting for the one before, one compiled program makes.
    """

    operation: str
    shape: Any
    variant: str
    chained: int = 1

    def record(self) -> Record:
        """Returns its key and its sizes."""
        chained = f"/{self.chained} chained" if self.chained > 1 else ""
        return {
            "key": f"{self.operation}/{self.shape}/{self.variant}{chained}",
            "operation": self.operation,
            "variant": self.variant,
            "chained": self.chained,
            "sizes": dataclasses.asdict(self.shape),
        }


class Provider(Protocol):
    """One way to do some operations; `name` is for reports and --provider."""

    name: str
    operations: tuple[str, ...]

    def start(self, case: Case, problem: Any) -> Started | list[Started]:
        """Compiles the case's operation; raises where it cannot run.

        It may do so in several ways, of which the fastest is measured.
        """
        ...


class Benchmark(abc.ABC):
    """The configuration of a benchmark.

    Attributes:
      providers: several may have one name, for different operations.
      default_operations: those without --operation; None for all.
      shape_type: a dataclass of ints, given as --shape.
      variants: what else differs between cases, such as how rows are distributed; the first is the
        default. `variant_option` is their option.
      drawn: the figures of which bars are drawn, two at most; none: the first.
      average: of the iterations of a round, "mean" or "median".
      rounds: of jax_ep, of which the first does not count if there are several.
      interleaved: the providers that are measured again after each round of jax_ep.
      warm_up_seconds: see `timing.device_times`.
      settling_seconds: of jax_ep's calls before a case is measured, so that the clocks settle.
      sweep: the size, of each rank, over which lines are drawn.
      has_energy: whether there is an option that measures energy.
    """

    name: ClassVar[str]
    operations: ClassVar[tuple[str, ...]]
    providers: ClassVar[tuple[Provider, ...]]
    default_operations: ClassVar[tuple[str, ...] | None] = None
    shape_type: ClassVar[Any]
    shapes: ClassVar[tuple[Any, ...]]
    smoke_shapes: ClassVar[tuple[Any, ...]]
    variants: ClassVar[tuple[str, ...]]
    variant_option: ClassVar[str]
    figures: ClassVar[tuple[Figure, ...]]
    drawn: ClassVar[tuple[Figure, ...]] = ()
    average: ClassVar[str]
    rounds: ClassVar[int] = 1
    interleaved: ClassVar[tuple[str, ...]] = ()
    iterations: ClassVar[int] = timing.ITERATIONS
    warm_up_seconds: ClassVar[float | None] = None
    settling_seconds: ClassVar[float] = 0
    sweep: ClassVar[str | None] = None
    has_energy: ClassVar[bool] = False

    @abc.abstractmethod
    def make_problem(self, shape: Any, variant: str, rotated_bytes: float) -> Any:
        """Makes the operands of a case, which calls in turn read at least `rotated_bytes` of.

        It may have an attribute `facts`, with values for the record of a case.
        """

    @abc.abstractmethod
    def add_figures(self, results: dict[str, Any]) -> None:
        """Adds the figures to every measurement with "seconds"."""

    @abc.abstractmethod
    def required(self, record: Record) -> Required:
        """Returns the providers without which a case does not count."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:  # noqa: B027
        """Adds the options of this benchmark alone."""

    def prepare(self, arguments: argparse.Namespace, results: dict[str, Any]) -> None:  # noqa: B027
        """Checks `arguments`, whose `shape` is what will be measured; may add to `results`."""

    def default_shapes(self, arguments: argparse.Namespace) -> tuple[Any, ...]:
        """Returns the shapes that are measured without --shape."""
        return self.smoke_shapes if arguments.smoke else self.shapes

    def chains(self, shape: Any) -> tuple[int, ...]:
        """Returns the numbers of chained calls that are measured of a shape."""
        return (1,)

    def chosen_providers(self, arguments: argparse.Namespace) -> list[Provider]:
        """Returns the providers named by --provider, or all."""
        return [p for p in self.providers if p.name in (arguments.provider or [p.name])]

    def applies(self, provider: Provider, case: Case) -> bool:
        """Returns whether a provider of the case's operation is one of this case."""
        return True

    def starts_early(self, provider: Provider) -> bool:
        """Returns whether a provider may start in a thread, before a shape is measured."""
        return False

    def order(self, chosen: list[Provider]) -> list[Provider]:
        """Returns the order of measurements: rounds of jax_ep, with `interleaved` after each."""
        again = [p for p in chosen if p.name in self.interleaved]
        order: list[Provider] = []
        for provider in chosen:
            order += [provider, *again] * self.rounds if provider.name == OURS else [provider]
        return order

    def check(self, started: Started, name: str, ours: Started | None) -> None:  # noqa: B027
        """Raises if a provider's result is wrong; `ours` is jax_ep's, if it has started."""

    def measures_energy(self, name: str) -> bool:
        """Returns whether the energy of the provider of this name is measured, too."""
        return True

    def finish(self, case: Case, started: dict[str, Started]) -> None:  # noqa: B027
        """Is called when all providers of a case are measured, with those that have started."""

    def plot(self, results: dict[str, Any], path: pathlib.Path) -> None:
        """Writes the figure."""
        report.plot(results, self.drawn or self.figures[:1], self.sweep, path)
