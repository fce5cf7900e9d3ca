"""What is timed, and how its times or its error get into a report."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jax_ep.bench import hlo, timing
from jax_ep.bench.timing import Completion, jax_completion


@dataclasses.dataclass(frozen=True)
class Started:
    """An operation that is ready to be timed.

    Attributes:
      call: enqueues it with one of `arguments` and returns its result.
      arguments: as made from the operands of the case.
      completion: how to wait for a result.
      to_jax: the result as a JAX array.
      repeats: how often one call does the operation.
      facts: what the report should have: JSON values.
    """

    call: Callable[[Any], Any]
    arguments: list[Any]
    completion: Completion = jax_completion
    to_jax: Callable[[Any], jax.Array] = lambda result: result
    repeats: int = 1
    facts: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])


def start_jax(computation: Callable[[Any], jax.Array], arguments: list[Any]) -> Started:
    """A JAX function that is compiled by itself: nothing else is in its program."""
    compiled = jax.jit(computation).lower(arguments[0]).compile()
    return Started(
        compiled, arguments, facts={"custom_calls": hlo.custom_calls(compiled.as_text() or "")}
    )


def measure(
    measurements: dict[str, Any],
    name: str,
    start: Callable[[], Started],
    iterations: int,
    warm_up_seconds: float | None = None,
) -> None:
    """Adds the times of what `start` returns to measurements[name], or the error.

    A second time for the same name adds a round to the first, unless there was an error.
    """
    if "error" in measurements.get(name, {}):
        return
    try:
        started = start()
        seconds = timing.device_times(
            started.call, started.arguments, iterations, started.completion, warm_up_seconds
        )
    except Exception as error:  # noqa: BLE001  whatever it is, the others go on
        text = " ".join(str(error).split())[:500]
        measurements[name] = {"error": f"{type(error).__name__}: {text}"}
        return
    measurement = measurements.setdefault(name, {"facts": started.facts, "rounds": []})
    times = timing.Times.of([s / started.repeats for s in seconds])
    measurement["rounds"].append(dataclasses.asdict(times))
