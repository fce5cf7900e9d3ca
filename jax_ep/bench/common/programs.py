"""Compiled programs for timing, with evidence of what is in them."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax_ep._src.core.chain import chain
from jax_ep._src.core.make_mesh import by_host
from jax_ep.bench.common.benchmark import Started

AXIS = "expert"

# An asynchronous one starts with -start, and ends with -done, which is not another.
_COLLECTIVE = re.compile(
    r" (ragged-all-to-all|all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute)"
    r"(?:-start)?\("
)
# Each is a kernel or a copy on a GPU; bitcasts and tuples are nothing.
_KERNEL = re.compile(r" (fusion|custom-call|copy|concatenate|convert|reduce|slice|transpose)\(")
_CUSTOM_CALL = re.compile(r' custom-call(?:-start)?\(.*?custom_call_target="([^"]*)"')


def implementation(mesh: Mesh | None = None, domain_size: int | None = None) -> str | None:
    """The kernels or an error on a GPU; pure JAX elsewhere, and for NVLink domains over hosts."""
    if jax.default_backend() != "gpu":
        return None
    over_hosts = mesh is not None and domain_size and len(by_host(list(mesh.devices.flat))) > 1
    return "xla" if over_hosts else "cuda"


def custom_calls(text: str) -> dict[str, int]:
    """Counts the custom calls in a program's text."""
    return dict(collections.Counter(_CUSTOM_CALL.findall(text)))


def collectives(text: str) -> dict[str, int]:
    """Counts the collectives in a program's text."""
    return dict(collections.Counter(_COLLECTIVE.findall(text)))


def kernels(text: str) -> int:
    """Counts the kernels of a program's entry in its text; those of loops once."""
    return len(_KERNEL.findall(text.partition("\nENTRY ")[2]))


def peak_bytes(compiled: jax.stages.Compiled) -> int | None:
    """Returns the device memory that a program takes: arguments, results, and what is between."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        return None
    return int(
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        + analysis.temp_size_in_bytes
        - analysis.alias_size_in_bytes
    )


def start_jax(
    computation: Callable[[Any], jax.Array],
    arguments: list[Any],
    *,
    repeats: int = 1,
    evidence: str | None = None,
) -> Started:
    """Compiles a JAX function by itself: nothing else is in its program.

    Args:
      computation: of one of `arguments`.
      arguments: for calls in turn.
      repeats: how often it does the operation.
      evidence: the custom call that must be in the program so often; None demands nothing.

    Raises:
      RuntimeError: it is there more or less often, so that something else would be timed.
    """
    compiled = jax.jit(computation).lower(arguments[0]).compile()
    text = compiled.as_text() or ""
    found = custom_calls(text)
    _check_evidence(found, evidence, repeats)
    facts = {"custom_calls": found, "kernels": kernels(text)}
    return Started(compiled, arguments, repeats=repeats, facts=facts)


def sharded(
    function: Callable[..., Any], mesh: Mesh, *, check_vma: bool = True
) -> Callable[..., Any]:
    """Maps `function` of one rank's arrays over all ranks."""
    return jax.shard_map(
        function, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=check_vma
    )


def start_sharded(
    transfer: Callable[..., Any],
    arguments: list[tuple[Any, ...]],
    mesh: Mesh,
    chained: int,
    evidence: str | None,
    *,
    check_vma: bool = True,
    compiler_options: dict[str, Any] | None = None,
) -> Started:
    """Compiles `chained` calls of `transfer` by themselves, over all ranks.

    Args:
      transfer: of one rank's arrays.
      arguments: for calls in turn, split over the ranks.
      mesh: the ranks.
      chained: see `chain`.
      evidence: the custom call or collective that must be in the program `chained` times; None
        demands nothing.
      check_vma: as in `jax.shard_map`. Pallas kernels of others may need False.
      compiler_options: XLA's.

    Raises:
      RuntimeError: it is there more or less often, so that something else would be timed.
    """
    is_cpu = jax.default_backend() == "cpu"
    program = jax.jit(sharded(chain(transfer, chained), mesh, check_vma=check_vma))
    # XLA:CPU drops barriers, and then merges equal calls; for GPUs it keeps them to the end.
    options = dict(compiler_options or {})
    if is_cpu:
        options["xla_disable_hlo_passes"] = "cse_barrier_expander"
    compiled = program.lower(*arguments[0]).compile(compiler_options=options)
    text = compiled.as_text() or ""
    _check_evidence(custom_calls(text) | collectives(text), evidence, chained)

    def call(given: tuple[Any, ...]) -> Any:
        result = compiled(*given)
        # CPU devices share threads: two programs at once may wait for each other forever.
        return jax.block_until_ready(result) if is_cpu else result

    facts = {
        "custom_calls": custom_calls(text),
        "collectives": collectives(text),
        "peak_bytes": peak_bytes(compiled),
    }
    return Started(call, arguments, repeats=chained, facts=facts)


def _check_evidence(found: dict[str, int], evidence: str | None, times: int) -> None:
    if evidence is not None and found.get(evidence) != times:
        raise RuntimeError(
            f"the compiled program should have {evidence} {times} times, but has "
            f"{found or 'no such call'}; something else would be timed. Compare the program's HLO "
            "(XLA_FLAGS=--xla_dump_to)."
        )
