"""Tuned numbers of SMs: the file that `tune` writes, and what transfers find in it."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from jax_ep._src.core import runtime
from jax_ep._src.core.errors import ArgumentError
from jax_ep._src.core.primitive import warn_once

VARIABLE = "JAX_EP_TUNING"


class Call(NamedTuple):
    """The static sizes of a transfer, by which it is looked up."""

    operation: str  # dispatch, redispatch or combine
    num_ranks: int
    num_tokens: int  # per rank
    row_bytes: int
    top_k: int
    num_experts: int
    domain_size: int | None


Microseconds = Mapping[int, float]
"""The time of a call by its number of SMs, of which 0 lets the launch code choose."""

Tuning = dict[str, dict[Call, int]]
"""The number of SMs of each call on each kind of GPU."""

_used: Tuning | None = None  # None: the variable is not yet read


def use_tuning(file: str | os.PathLike[str] | None) -> None:
    """Makes transfers use the numbers of SMs that `tune` wrote into a file.

    A dispatch, redispatch or combine that is given no ``num_sms`` and runs beside no other transfer
    is looked up by its shape when a program is lowered for CUDA; programs that are compiled already
    stay as they are. Calls, kinds of GPUs and versions of jax_ep that are not in the file have what
    they have without it. The environment variable ``JAX_EP_TUNING`` names a file as well. Give all
    processes the same one.

    For example::

        jax_ep.use_tuning(None)  # as without a file, whatever JAX_EP_TUNING says

    Args:
      file: what `tune` has written; None for none.

    Raises:
      ArgumentError (a ValueError): it cannot be read, or `tune` has not written it.
    """
    global _used
    _used = {} if file is None else read(pathlib.Path(file))


def tuned_sms(call: Call) -> int:
    """Returns the number of SMs of a call on this process's GPUs; 0 where it is not tuned."""
    if _used is None:
        use_tuning(os.environ.get(VARIABLE) or None)
    assert _used is not None
    return _used.get(runtime.gpu_kind(), {}).get(call, 0) if _used else 0


def read(file: pathlib.Path) -> Tuning:
    """Returns what the file has for this version of jax_ep, with a warning if it is of another."""
    return _read(file)[1]


def write(file: pathlib.Path, gpu: str, calls: Mapping[Call, tuple[int, Microseconds]]) -> None:
    """Adds calls, each with its number of SMs and all times, to those that the file has."""
    gpus = _read(file)[0] if file.exists() else {}
    others = [entry for entry in gpus.get(gpu, []) if _call(entry) not in calls]
    gpus[gpu] = others + [
        call._asdict() | {"num_sms": num_sms, "microseconds": dict(times)}
        for call, (num_sms, times) in calls.items()
    ]
    # Processes may write the same file at once, and others read it.
    part = file.with_name(f"{file.name}.{os.getpid()}")
    part.write_text(json.dumps({"jax_ep": _version(), "gpus": gpus}, indent=1))
    part.replace(file)


def _read(file: pathlib.Path) -> tuple[dict[str, list[dict[str, Any]]], Tuning]:
    """Returns the entries of each GPU, and what they say; nothing if another version wrote them."""
    try:
        content = json.loads(file.read_text())
        version, gpus = content["jax_ep"], content["gpus"]
        found = {gpu: {_call(entry): entry["num_sms"] for entry in of} for gpu, of in gpus.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArgumentError(
            f"jax_ep.use_tuning: {file} cannot be read as what jax_ep.tune writes "
            f"({type(error).__name__}: {error}). Give another file, or let jax_ep.tune write it."
        ) from error
    if version == _version():
        return gpus, found
    warn_once(
        f"tuning of {version} in {file}",
        f"jax_ep.use_tuning: {file} was written by jax_ep {version}, and this is {_version()}, "
        "whose kernels may differ: it is not used. Call jax_ep.tune to write it anew.",
    )
    return {}, {}


def _call(entry: Mapping[str, Any]) -> Call:
    return Call(*(entry[name] for name in Call._fields))


def _version() -> str:
    return str(runtime.build_info()["version"])
