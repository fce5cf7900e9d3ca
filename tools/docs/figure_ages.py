"""Lists figures of the docs that are older than the kernels that they show.

  python tools/docs/figure_ages.py

A table in docs/data/ says with which commit it was measured ("recorded": "2026-11-27, commit
50955f9") and what it shows ("kernels": folders of sources, or other pathspecs of git);
docs/data/pictures.json says so of pictures. An age is the number of later commits that change these
sources. A new comment counts too, so a figure that is listed may still hold; one that is not does.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[2]
COMMIT = re.compile(r"\bcommit ([0-9a-f]{7,40})$")


@dataclasses.dataclass(frozen=True)
class Figure:
    """A table or a picture, when it was measured, and the sources of the kernels that it shows."""

    name: str
    recorded: str
    kernels: tuple[str, ...]

    @property
    def commit(self) -> str:
        """The commit. Raises ValueError if there is none."""
        found = COMMIT.search(self.recorded)
        if found is None:
            raise ValueError(
                f"{self.name}: recorded is {self.recorded!r}; expected a date and a commit, as in "
                '"2026-11-27, commit 50955f9".'
            )
        return found[1]


def figures(root: pathlib.Path = ROOT) -> Iterator[Figure]:
    """Yields those that were measured with kernels."""
    for path in sorted(root.glob("docs/data/*.json")):
        table = json.loads(path.read_text())
        if path.name == "pictures.json":
            for name, recorded, kernels in table["rows"]:
                yield Figure(f"docs/images/{name}", recorded, tuple(kernels.split()))
        elif "kernels" in table:
            yield Figure(f"docs/data/{path.name}", table["recorded"], tuple(table["kernels"]))


def later_commits(figure: Figure, root: pathlib.Path = ROOT) -> int:
    """Returns how many commits have changed since what the figure shows."""
    command = ["git", "rev-list", "--count", f"{figure.commit}..HEAD", "--", *figure.kernels]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"{figure.name}: {done.stderr.strip()}. Is the clone a shallow one?")
    return int(done.stdout)


def main() -> int:
    """Prints the list; the exit status is 1 if a figure's commit is not known."""
    try:
        ages = {figure: later_commits(figure) for figure in figures()}
    except ValueError as error:
        print(error)
        return 1
    for figure, age in ages.items():
        if age:
            print(f"{figure.name}: {figure.recorded}; {age} later commits change its kernels")
    print(f"{sum(map(bool, ages.values()))} of {len(ages)} figures are older than their kernels")
    return 0


if __name__ == "__main__":
    sys.exit(main())
