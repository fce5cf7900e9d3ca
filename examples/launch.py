"""Runs an example in several processes of this machine: one for each GPU, or on CPU devices.

    python examples/launch.py 2 examples/train_moe_lm.py --cpu-devices=1

SLURM and Kubernetes start processes themselves: there, give the example `--distributed`. If one
process fails, all are killed: others would wait for it, and a process under `jax.distributed`
survives SIGTERM.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time


def main() -> int:
    """Starts the processes, and returns the first status that is not 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("processes", type=int, help="their number")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="a Python file and its arguments")
    arguments = parser.parse_args()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{listener.getsockname()[1]}"
    started = [
        subprocess.Popen(
            [sys.executable, *arguments.command],
            env=os.environ | {"EXAMPLE_PROCESS": f"{coordinator},{arguments.processes},{process}"},
        )
        for process in range(arguments.processes)
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
