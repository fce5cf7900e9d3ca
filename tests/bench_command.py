"""`python -m jax_ep.bench`, in the process of a test."""

from __future__ import annotations

import contextlib
import io
import os
import unittest.mock

from jax_ep.bench import __main__ as bench
from jax_ep.bench import timing

QUICK = {"WARM_UP_SECONDS": 0, "BURST_SECONDS": 0.001}


def run(*arguments: str) -> tuple[int, str]:
    """Exit status and output of a command, without the time for warming up."""
    printed = io.StringIO()
    with (
        unittest.mock.patch("sys.argv", ["bench", *arguments]),
        unittest.mock.patch.dict(os.environ),
        unittest.mock.patch.multiple(timing, **QUICK),
        contextlib.redirect_stdout(printed),
    ):
        return bench.main(), printed.getvalue()
