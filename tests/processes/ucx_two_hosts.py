"""Runs ucx_test on two hosts, which are namespaces of this machine, over TCP. ctest runs this:

    python ucx_two_hosts.py BUILD/ucx_test FOLDER_OF_LIBUCP

Puts go both ways; then the cable is pulled, and both processes end with an error in time. The exit status is 77 where
the machine makes no hosts.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import unittest
from collections.abc import Iterator

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "helpers"))
import two_hosts

SKIPPED = 77
TIMEOUT_SECONDS = 60
ERROR_SECONDS = 10  # the program's deadline is 3 s
PULL = f"""
from pyroute2 import IPRoute

with IPRoute() as route:
    route.link("set", index=route.link_lookup(ifname={two_hosts.INTERFACE!r})[0], state="down")
"""


@contextlib.contextmanager
def ranks(hosts: list[two_hosts.Host], *command: str) -> Iterator[list[subprocess.Popen[str]]]:
    """The program on each host. The two tell each other their addresses by pipes, which are files."""
    with tempfile.TemporaryDirectory() as folder:
        pipes = [f"{folder}/{rank}" for rank in range(2)]
        for pipe in pipes:
            os.mkfifo(pipe)
        yield [
            subprocess.Popen(
                host.command(*command, f"--rank={rank}", f"--write={write}", f"--read={read}"),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank, (host, write, read) in enumerate(zip(hosts, pipes, pipes[::-1], strict=True))
        ]


def check_exchange(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
        assert process.returncode == 0, output
        assert f"tcp/{two_hosts.INTERFACE}" in output, output


def check_pulled_cable(processes: list[subprocess.Popen[str]], host: two_hosts.Host) -> None:
    for process in processes:
        lines = [process.stdout.readline() for _ in range(2)]
        assert lines[1] == "exchanged\n", lines + process.communicate()[0].splitlines()
    subprocess.run(host.command(sys.executable, "-c", PULL), check=True)
    pulled = time.monotonic()
    for process in processes:
        output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
        assert time.monotonic() - pulled < ERROR_SECONDS, output
        assert "error: jax_ep: the connection to partner 0 by UCX" in output, output


def main() -> int:
    try:
        with two_hosts.start() as hosts:
            with ranks(hosts, *sys.argv[1:]) as processes:
                check_exchange(processes)
            with ranks(hosts, *sys.argv[1:], "--until-error") as processes:
                check_pulled_cable(processes, hosts[0])
    except unittest.SkipTest as reason:
        print(f"skipped: {reason}")
        return SKIPPED
    return 0


if __name__ == "__main__":
    sys.exit(main())
