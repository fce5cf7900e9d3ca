"""profile: what each block of each kernel did and waited for."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import jax

from jax_ep._src.core import checks, extension
from jax_ep._src.core.errors import ArgumentError, Error, MissingExtensionError, UnavailableError
from jax_ep._src.profile.records import Device, read
from jax_ep._src.profile.summary import summarize
from jax_ep._src.profile.trace import write_trace

if TYPE_CHECKING:
    from jax_ep import _ffi
else:
    _ffi = extension.module

_MAX_RECORDS = 2**24


class Profile:
    """Holds what `profile` recorded. `str()` of it is `summary()`."""

    def __init__(self, folder: pathlib.Path, rank: int):
        self._folder = folder
        self._rank = rank
        self._devices: Sequence[Device] = ()

    @property
    def trace(self) -> pathlib.Path:
        """The trace, which ui.perfetto.dev opens. It is written when the context ends."""
        return self._folder / f"trace_{self._rank}.json.gz"

    @property
    def picture(self) -> pathlib.Path:
        """A PNG of the last launch of each kernel: its blocks over time, colored by what they did.

        Drawn when this is first read, by matplotlib.
        """
        path = self._folder / f"picture_{self._rank}.png"
        if path.exists():
            return path
        try:
            from jax_ep._src.profile.picture import draw
        except ImportError:
            raise MissingExtensionError(
                "jax_ep.profile: a picture needs the package matplotlib, which cannot be imported. "
                'Install it: pip install "jax_ep[bench]".'
            ) from None
        draw(path, self._devices)
        return path

    def summary(self) -> str:
        """Returns each kernel's launches, their mean time, and what its warps did meanwhile.

        The time of a launch is that from the begin of its first block to the end of its last one.
        """
        return summarize(self._devices)

    __str__ = summary


@contextlib.contextmanager
def profile(
    folder: str | os.PathLike[str], *, max_records: int = 2**21, all_warps: bool = False
) -> Iterator[Profile]:
    """Records what the blocks of kernels do and wait for, on all GPUs of this process.

    It needs a build with ``JAX_EP_PROFILE=ON``; in other builds the kernels have no instructions
    that record. Block on results inside the context, because only calls that have run are recorded.
    Run the program once before, so that nothing is compiled meanwhile.

    For example::

        if jax_ep.build_info()["profile"]:
            with jax_ep.profile("profile") as profile:
                jax.block_until_ready(step(x))
            print(profile)
            print("open", profile.trace, "at ui.perfetto.dev, or look at", profile.picture)

    Args:
      folder: where the files go; made if need be. Each process writes files of its own, with its
        ``jax.process_index()`` in their names, over those of an earlier profile.
      max_records: the room on each GPU, 16 bytes per record. Where it ends, spans are counted and
        lost.
      all_warps: records all warps of a block instead of the first one of each role. Warps of one
        role do alike.

    Yields:
      A `Profile`. Its files and `Profile.summary` are complete when the context has ended.

    Raises:
      UnavailableError: the kernels of this build do not record, or the process has no GPU.
      ArgumentError, DtypeError: max_records is not an int from 16 to 2**24.
      Error: another profile is being recorded, or a GPU has failed.
    """
    if not _ffi.build_info()["profile"]:
        raise UnavailableError(
            "jax_ep.profile: the kernels of this build do not record; expected kernels that were "
            "built with JAX_EP_PROFILE=ON. Install them by `JAX_EP_PROFILE=ON pip install .` in a "
            "checkout, or use jax.profiler, which shows kernels as a whole."
        )
    max_records = checks.integer("profile", "max_records", max_records, least=16)
    if max_records > _MAX_RECORDS:
        raise ArgumentError(
            f"jax_ep.profile: max_records={max_records}; expected at most {_MAX_RECORDS}. Profile "
            "fewer calls at a time."
        )
    try:
        ordinals = [device.local_hardware_id for device in jax.local_devices(backend="cuda")]
    except RuntimeError:
        raise UnavailableError(
            "jax_ep.profile: this process has no GPU; expected one, as kernels record and the "
            "pure-JAX implementation does not. Run the program on GPUs, or use jax.profiler."
        ) from None
    path = pathlib.Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    profiled = Profile(path, jax.process_index())
    for file in (profiled.trace, path / f"picture_{jax.process_index()}.png"):
        file.unlink(missing_ok=True)
    _check(_ffi.start_profile(ordinals, max_records, all_warps))
    try:
        yield profiled
    except BaseException:
        _ffi.stop_profile()
        raise
    problem, recorded = _ffi.stop_profile()
    _check(problem)
    profiled._devices = read(recorded, _ffi.profile_names())
    write_trace(profiled.trace, profiled._devices)


def _check(problem: str) -> None:
    if problem:
        raise Error(f"jax_ep.profile: {problem.removeprefix('jax_ep: ')}.")
