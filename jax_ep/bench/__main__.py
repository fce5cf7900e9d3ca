"""``python -m jax_ep.bench COMMAND [options]``: the commands are the packages listed below."""

from __future__ import annotations

import argparse
import importlib
import sys

# Each has a `BENCHMARK`.
COMMANDS = {
    "layer": "a whole mixture-of-experts block beside its parts and layers of others",
    "matmul": "grouped_matmul beside dense and grouped matmuls of others",
    "quantize": "quantizing rows and weights beside a copy",
    "transfer": "dispatch and combine beside the collectives of JAX",
}


def main() -> int:
    """Runs the command that is named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m jax_ep.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, summary in COMMANDS.items():
        try:
            module = importlib.import_module(f"jax_ep.bench.{name}.benchmark")
            harness = importlib.import_module("jax_ep.bench.common.harness")
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] not in ("rich", "matplotlib"):
                raise
            parser.exit(1, f"{error}. Install what it needs: pip install 'jax_ep[bench]'\n")
        command = commands.add_parser(
            name,
            help=summary,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        harness.add_arguments(command, module.BENCHMARK)
        command.set_defaults(run=harness.run, benchmark=module.BENCHMARK)
    arguments = parser.parse_args()
    return int(arguments.run(arguments.benchmark, arguments))


if __name__ == "__main__":
    sys.exit(main())
