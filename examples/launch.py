"""Runs an example in several processes of this machine: one for each GPU, or on CPU devices.

    python examples/launch.py 2 examples/train_moe_lm.py --cpu-devices=1

On several hosts, start it on each, with an address of host 0 and a port that is free there:

    python examples/launch.py --coordinator=10.0.0.1:9876 --hosts=2 --host=0 8 FILE ARGUMENTS...

SLURM and Kubernetes start processes themselves: there, give the example `--distributed`. If one
process fails, all of its host are killed: others would wait for it, and a process under
`jax.distributed` survives SIGTERM.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time


def parse_arguments() -> argparse.Namespace:
    """Parses the command line, in which the options come first."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="of host 0, if there are more")
    parser.add_argument("--hosts", type=int, default=1, metavar="N", help="their number")
    parser.add_argument("--host", type=int, default=0, metavar="I", help="this one, from 0")
    parser.add_argument("processes", type=int, help="their number on this host, as on any other")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="a Python file and its arguments")
    arguments = parser.parse_args()
    if arguments.hosts > 1 and arguments.coordinator is None:
        parser.error("several hosts need a --coordinator, which is the same on each")
    return arguments


def main() -> int:
    """Starts the processes, and returns the first status that is not 0."""
    arguments = parse_arguments()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        coordinator = arguments.coordinator or f"127.0.0.1:{listener.getsockname()[1]}"
    count = arguments.hosts * arguments.processes
    first = arguments.host * arguments.processes
    started = [
        subprocess.Popen(
            [sys.executable, *arguments.command],
            env=os.environ | {"EXAMPLE_PROCESS": f"{coordinator},{count},{first + gpu},{gpu}"},
        )
        for gpu in range(arguments.processes)
    ]
    try:
        while True:
            statuses = [process.poll() for process in started]
            failed = [status for status in statuses if status]
            if failed or None not in statuses:
                return abs(failed[0]) if failed else 0
            time.sleep(0.1)
    finally:
        for process in started:
            process.kill()
            process.wait()


if __name__ == "__main__":
    sys.exit(main())
