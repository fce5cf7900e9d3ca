"""``python -m jax_ep.bench COMMAND [options]``: the commands are the modules listed below."""

from __future__ import annotations

import argparse
import importlib
import sys

# Each has `add_arguments(parser)` and `run(arguments) -> exit status`.
COMMANDS = {
    "matmul": "grouped_matmul beside dense and grouped matmuls of others",
    "transfer": "dispatch and combine beside the collectives of JAX",
}


def main() -> int:
    """Runs the command that is named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m jax_ep.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, summary in COMMANDS.items():
        try:
            module = importlib.import_module(f"jax_ep.bench.{name}")
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
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    arguments = parser.parse_args()
    return int(arguments.run(arguments))


if __name__ == "__main__":
    sys.exit(main())
