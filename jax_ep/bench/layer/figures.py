"""The figures of a layer: ratios to sums of parts, round by round, and peak memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from jax_ep.bench.common.benchmark import Case, Provider
from jax_ep.bench.common.report import OURS, Record, counted, ratio
from jax_ep.bench.layer.parts import Dense, Part
from jax_ep.bench.layer.providers import KEEPING_ROWS, Baseline
from jax_ep.bench.layer.quantized import LAYERS, QUANTIZING

MAX_DECODED_TOKENS = 64
MICROBATCHES = 1, 8
AGAIN = "part: dispatch of x again"  # which the layer that keeps its rows does not make


def add_ratios(
    record: Record, case: Case, providers: list[Provider], copied_bytes_per_second: float
) -> None:
    """Adds "sums" to a case's record, and TFLOP/s and ratios to the sums to its measurements.

    Args:
      record: of the case.
      case: the case.
      providers: those that apply to it.
      copied_bytes_per_second: the rate at which weights can be read.
    """
    measured = record["measurements"]
    sums = _sums(measured, providers)
    transfers = _sum(measured, providers, lambda p: isinstance(p, Part) and p.kind == "transfer")
    shape = case.shape
    if transfers and case.operation == "forward" and shape.tokens <= MAX_DECODED_TOKENS:
        itemsize = 2 if case.variant == "bfloat16" else 4
        read = record.get("active_experts", 0) * shape.expert_elements * itemsize
        sums["of_reading"] = [seconds + read / copied_bytes_per_second for seconds in transfers]
    record["sums"] = {name: statistics.fmean(counted(rounds)) for name, rounds in sums.items()}
    flops = 2 * shape.rows * shape.expert_elements * (1 if case.operation == "forward" else 3)
    again = _rounds(measured, AGAIN)
    for name, measurement in measured.items():
        if "seconds" not in measurement or name.startswith(("part", "dense")):
            continue
        measurement["tflops"] = flops / measurement["seconds"] / 1e12
        for figure, rounds in sums.items():
            if name == KEEPING_ROWS and again:
                rounds = [a - b for a, b in zip(rounds, again, strict=False)]
            measurement[figure] = ratio(_rounds(measured, name), rounds)


def add_speedups(record: Record) -> None:
    """Adds how much faster than in bfloat16 steps of some microbatches are, by recipes.

    A step quantizes its weights once. Whatever else it does is left out.
    """
    measured = record["measurements"]
    ours, quantizing = (_rounds(measured, name) for name in (OURS, QUANTIZING.name))
    for layer in LAYERS:
        passes = _rounds(measured, layer.name)
        if not (layer.before and ours and quantizing and passes):
            continue
        for count in MICROBATCHES:
            steps = [a + b / count for a, b in zip(passes, quantizing, strict=False)]
            measured[layer.name][f"speedup_{count}"] = ratio(ours, steps)


def _sums(measured: dict[str, Any], providers: list[Provider]) -> dict[str, list[float]]:
    """The seconds of all parts in each round, and with what is dense in the matmuls' place."""

    def is_other(p: Provider) -> bool:
        return isinstance(p, Part) and p.kind != "matmul"

    def is_dense_matmul(p: Provider) -> bool:
        return isinstance(p, Dense) and p.is_matmul

    sums = {"of_sum": _sum(measured, providers, lambda p: isinstance(p, Part))}
    if any(map(is_dense_matmul, providers)):
        sums["of_dense_sum"] = _sum(
            measured, providers, lambda p: is_other(p) or isinstance(p, Dense)
        )
        sums["of_dense_matmuls"] = _sum(
            measured, providers, lambda p: is_other(p) or is_dense_matmul(p)
        )
    return {name: rounds for name, rounds in sums.items() if rounds}


def _sum(
    measured: dict[str, Any], providers: list[Provider], is_one: Callable[[Provider], bool]
) -> list[float]:
    """The sum of some in each round that all have; none if one has no time."""
    found = (_rounds(measured, p.name) for p in providers if is_one(p))
    return [sum(seconds) for seconds in zip(*found, strict=False)]


def _rounds(measured: dict[str, Any], name: str) -> list[float]:
    return [times["mean"] for times in measured.get(name, {}).get("rounds", [])]


def add_peaks(record: Record, providers: list[Provider]) -> None:
    """Adds peak memory, and that of jax_ep over the least in plain JAX, to the measurements."""
    measured = record["measurements"]
    for name, measurement in measured.items():
        peak = measurement.get("facts", {}).get("peak_bytes")
        if "seconds" in measurement and peak is not None and not name.startswith(("part", "dense")):
            measurement["peak_gib"] = peak / 2**30
    peaks = [
        measured[p.name]["peak_gib"]
        for p in providers
        if isinstance(p, Baseline)
        and not p.name.startswith("einsum")  # it has another capacity
        and "peak_gib" in measured.get(p.name, {})
    ]
    for name in (OURS, KEEPING_ROWS) if peaks else ():
        if "peak_gib" in measured.get(name, {}):
            measured[name]["of_plain_peak"] = measured[name]["peak_gib"] / min(peaks)
