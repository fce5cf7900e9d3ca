"""Keeps the tables of README.md and docs/ equal to the figures in docs/data/.

  tools/docs/doc_tables.py check    prints what differs; the exit status is 1 if anything does
  tools/docs/doc_tables.py write    writes the tables again from their data

A table with a source stands right below a comment that names it: <!-- from docs/data/NAME.json -->.
The file holds the cells as they are printed, and may say that its figures are another file's:

  {"caption": str, "device": str, "columns": [str], "rows": [[str, ...]],
   "excerpt_of": "OTHER.json",
   "ratios": {"speedup": ["fastest baseline", "jax_ep"]}}

"ratios" are columns: each is the quotient of the first numbers in two other columns, rounded to the
digits that it has. All other numbers of an excerpt's row must stand in one row of the other file.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import re
import sys
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[2]
MARK = re.compile(r"^<!-- from (docs/data/\S+\.json) -->$")
NUMBER = re.compile(r"\d+(?:\.\d+)?")

Rows = list[list[str]]


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of a page: the lines that it takes, and its source."""

    page: pathlib.Path
    source: str
    first_line: int  # after the mark, from 0
    lines: tuple[str, ...]

    @property
    def rows(self) -> Rows:
        """The cells, without the line below the head."""
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in self.lines]
        return cells[:1] + cells[2:]


def pages(root: pathlib.Path) -> list[pathlib.Path]:
    """Returns the pages that may have tables."""
    return [root / "README.md", *sorted(root.glob("docs/**/*.md"))]


def tables(page: pathlib.Path) -> Iterator[Table]:
    """Yields the tables of a page that have a source."""
    lines = page.read_text().splitlines()
    for number, line in enumerate(lines, 1):
        if mark := MARK.match(line):
            end = number
            while end < len(lines) and lines[end].startswith("|"):
                end += 1
            yield Table(page, mark[1], number, tuple(lines[number:end]))


def load(path: pathlib.Path) -> Rows:
    """Returns the rows of a source, the columns' names first."""
    data = json.loads(path.read_text())
    return [data["columns"], *data["rows"]]


def markdown(rows: Rows) -> list[str]:
    """Returns the lines of a table."""
    lines = ["".join(f"| {cell} " if cell else "| " for cell in row) + "|" for row in rows]
    return [lines[0], "|---" * len(rows[0]) + "|", *lines[1:]]


def check_table(table: Table, root: pathlib.Path) -> list[str]:
    """Returns what differs between a table and its source, a line for each row."""
    where = f"{table.page.relative_to(root)}:{table.first_line + 1}"
    if not (root / table.source).exists():
        return [f"{where}: {table.source} does not exist"]
    expected = load(root / table.source)
    if len(table.rows) != len(expected):
        return [f"{where}: {len(table.rows)} rows, and {table.source} has {len(expected)}"]
    return [
        f"{where}: {found} is {row} in {table.source}"
        for found, row in zip(table.rows, expected, strict=True)
        if found != row
    ]


def check_source(path: pathlib.Path) -> list[str]:
    """Returns what is wrong with a source: uneven rows, wrong ratios, figures of its own."""
    data = json.loads(path.read_text())
    columns, ratios = data["columns"], data.get("ratios", {})
    others = None
    if "excerpt_of" in data:
        others = [_numbers(row) for row in load(path.with_name(data["excerpt_of"]))[1:]]
    problems = []
    for row in data["rows"]:
        if len(row) != len(columns):
            problems.append(f"{path.name}: {row} has not {len(columns)} cells")
            continue
        cells = dict(zip(columns, row, strict=True))
        for name, (dividend, divisor) in ratios.items():
            problems += _check_ratio(
                f"{path.name}: {row}", cells[name], cells[dividend], cells[divisor]
            )
        figures = _numbers([cell for name, cell in cells.items() if name not in ratios])
        if others is not None and not any(figures <= other for other in others):
            problems.append(f"{path.name}: no row of {data['excerpt_of']} has the figures of {row}")
    return problems


def _check_ratio(where: str, ratio: str, dividend: str, divisor: str) -> list[str]:
    found = [NUMBER.search(cell) for cell in (ratio, dividend, divisor)]
    if None in found:
        return [f"{where} has no numbers for a ratio"]
    text, above, below = (match[0] for match in found if match)
    digits = len(text.partition(".")[2])
    quotient = float(above) / float(below)
    if abs(float(text) - quotient) <= 0.5001 * 10**-digits:
        return []
    return [f"{where}: {above} / {below} is {quotient:.{digits}f}, not {text}"]


def _numbers(cells: list[str]) -> set[str]:
    return {number for cell in cells for number in NUMBER.findall(cell)}


def check(root: pathlib.Path = ROOT) -> list[str]:
    """Returns what is wrong with the repository's tables and their sources."""
    problems = []
    for path in sorted(root.glob("docs/data/*.json")):
        problems += check_source(path)
    for page in pages(root):
        for table in tables(page):
            problems += check_table(table, root)
    return problems


def write(root: pathlib.Path = ROOT) -> None:
    """Replaces the tables by what their sources say."""
    for page in pages(root):
        lines = page.read_text().splitlines()
        for table in reversed(list(tables(page))):
            end = table.first_line + len(table.lines)
            lines[table.first_line : end] = markdown(load(root / table.source))
        page.write_text("\n".join(lines) + "\n")


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("check", "write"))
    if parser.parse_args(arguments).command == "write":
        write()
    problems = check()
    print("\n".join(problems) or "every table agrees with its source")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
