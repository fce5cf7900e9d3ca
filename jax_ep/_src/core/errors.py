"""The errors jax_ep raises: each is also the built-in error a caller would expect."""

from __future__ import annotations


class Error(Exception):
    """Base of every error raised by jax_ep."""


class ArgumentError(Error, ValueError):
    """A shape, a value or a mesh axis does not fit."""


class DtypeError(Error, TypeError):
    """A dtype, or the Python type of an argument, is not one that the operation takes."""


class UnavailableError(Error, NotImplementedError):
    """The requested implementation does not exist for this platform, build or shape."""


class MissingExtensionError(Error, ImportError):
    """The compiled module ``jax_ep._ffi`` cannot be imported."""


class PeerTimeoutError(Error, RuntimeError):
    """A rank waited for a peer until the deadline.

    Attributes:
      rank: the rank that waited.
      peer: the rank it waited for.
      phase: the operation and its wait point, e.g. ``"dispatch.entry"``.
      sequence_number: the number of the call, counted from 1 in every generation.
    """

    def __init__(self, rank: int, peer: int, phase: str, sequence_number: int):
        super().__init__(
            f"rank {rank} waited for rank {peer} in {phase} (sequence number {sequence_number}) "
            "until the deadline. Every later call of this generation returns NaN at once. Find out "
            "why the peer did not make the call (an exception there, another program, a dead "
            "process), then call jax_ep.release() on every rank to start again."
        )
        self.rank = rank
        self.peer = peer
        self.phase = phase
        self.sequence_number = sequence_number
