"""The documentation speaks of what exists: links, paths, public names, custom calls, plan, workspace, figures, data."""

from __future__ import annotations

import importlib
import importlib.util
import json
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import Any

import jax.export
from absl.testing import absltest, parameterized

import jax_ep
from jax_ep._src.transfer.domains import Forwarding
from jax_ep._src.transfer.plan import NUM_ARRAYS, PlanArrays

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
MAX_LINES = 200
LISTS = ("errors.md",)  # every message there is: as long as it takes
MAX_IMAGE_BYTES = 150_000
BENCHMARK_TARGETS = {"jax_ep.bulk_copy_ceiling.v1"}

CODE_BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
CODE_SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"(!?)\[[^\]]*\]\(([^)\s]+)\)")
FOLDERS = sorted(path.name for path in ROOT.iterdir() if path.is_dir())
PATH = re.compile(rf"(?:{'|'.join(map(re.escape, FOLDERS))})/[\w./-]*[\w/]")
NAME = re.compile(r"\bjax_ep(?:\.\w+)+")
TARGET = re.compile(r"\bjax_ep\.\w+\.v\d+\b")


def prose(page: pathlib.Path) -> str:
    """Its text without code blocks."""
    return CODE_BLOCK.sub("", page.read_text())


def anchors(page: pathlib.Path) -> set[str]:
    """The anchors of its headings, by GitHub's rule."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def paths(page: pathlib.Path) -> set[str]:
    """Those of this repository that stand in its code spans."""
    spans = CODE_SPAN.findall(prose(page))
    return {path for span in spans for path in PATH.findall(span) if f"/{path}" not in span}


def resolve(name: str) -> bool:
    """Whether ``jax_ep.a.b`` is an attribute or a module."""
    value: Any = jax_ep
    parts = name.split(".")[1:]
    for index, part in enumerate(parts):
        module = ".".join(["jax_ep", *parts[: index + 1]])
        if hasattr(value, part):
            value = getattr(value, part)
        elif hasattr(value, "__path__") and importlib.util.find_spec(module) is not None:
            if index == len(parts) - 1:
                return True
            value = importlib.import_module(module)
        else:
            return False
    return True


def first_column(page: pathlib.Path, heading: str) -> list[str]:
    """The code spans in the first cells of the table below a heading."""
    section = page.read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]*`) \|", section, re.MULTILINE)
    return [span for row in rows for span in CODE_SPAN.findall(row)]


def data(name: str) -> Any:
    """A table of docs/data."""
    return json.loads((DOCS / "data" / f"{name}.json").read_text())


class PagesTest(parameterized.TestCase):
    @parameterized.named_parameters(*((str(p.relative_to(ROOT)), p) for p in PAGES))
    def test_links_lead_somewhere(self, page):
        for _, link in LINK.findall(prose(page)):
            if "://" in link:
                continue
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            self.assertTrue(target.exists(), f"{page}: {link}")
            if anchor:
                self.assertIn(anchor, anchors(target), f"{page}: {link}")

    @parameterized.named_parameters(*((str(p.relative_to(ROOT)), p) for p in PAGES))
    def test_paths_exist(self, page):
        missing = [path for path in paths(page) if not (ROOT / path).exists()]
        self.assertEmpty(missing, page)

    @parameterized.named_parameters(*((str(p.relative_to(ROOT)), p) for p in PAGES))
    def test_public_names_exist(self, page):
        text = page.read_text()
        names = set(NAME.findall(TARGET.sub("", text)))
        self.assertEmpty([name for name in names if not resolve(name)], page)

    def test_pages_are_short(self):
        lengths = {p: len(p.read_text().splitlines()) for p in PAGES[1:] if p.name not in LISTS}
        self.assertEmpty({p: n for p, n in lengths.items() if n > MAX_LINES})

    def test_there_is_something_to_check(self):
        page = DOCS / "design" / "README.md"
        self.assertIn("ffi/device/protocol/", paths(page))
        self.assertIn("data-flow", " ".join(LINK.findall(prose(DOCS / "design" / "plan.md"))[0]))
        self.assertTrue(resolve("jax_ep.nnx.MoE"))
        self.assertFalse(resolve("jax_ep.no_such_name"))
        self.assertFalse(resolve("jax_ep.bench.no_such_module"))


class ReferenceTest(parameterized.TestCase):
    def test_custom_calls_are_those_that_are_exported(self):
        documented = set(TARGET.findall((DOCS / "design" / "README.md").read_text()))
        self.assertContainsSubset(BENCHMARK_TARGETS, documented)
        checks = {
            jax.export.DisabledSafetyCheck.custom_call(target)
            for target in documented - BENCHMARK_TARGETS
        }
        self.assertEqual(checks, set(jax_ep.export_checks()))

    def test_arrays_of_a_plan(self):
        arrays = first_column(DOCS / "design" / "plan.md", "The arrays")
        self.assertEqual(arrays, list(PlanArrays._fields[:NUM_ARRAYS]))
        private = first_column(DOCS / "design" / "plan.md", "NVLink domains")
        self.assertEqual(private, list(Forwarding._fields))

    def test_buffers_of_a_workspace(self):
        buffers = first_column(DOCS / "design" / "runtime.md", "Workspaces")
        self.assertCountEqual(buffers, jax_ep.memory(16, 64, 32, 4, 2, 2).workspace)


class FiguresTest(absltest.TestCase):
    def test_figures_are_those_that_the_program_draws(self):
        program = DOCS / "figures" / "draw.py"
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([sys.executable, str(program), "--out", folder], check=True, timeout=300)
            drawn = {path.name: path.stat().st_size for path in pathlib.Path(folder).iterdir()}
        self.assertNotEmpty(drawn)
        for name, size in drawn.items():
            self.assertLess(size, MAX_IMAGE_BYTES, name)
            self.assertTrue((DOCS / "images" / name).exists(), name)

    def test_every_image_is_shown(self):
        shown = {
            (page.parent / link).resolve()
            for page in PAGES
            for is_image, link in LINK.findall(page.read_text())
            if is_image
        }
        self.assertEmpty(set((DOCS / "images").iterdir()) - shown)


class DataTest(parameterized.TestCase):
    """README's small tables are taken from the full ones."""

    def test_tables_are_rectangular(self):
        for path in (DOCS / "data").glob("*.json"):
            table = json.loads(path.read_text())
            self.assertContainsSubset({"caption", "device", "columns", "rows"}, table)
            for row in table["rows"]:
                self.assertLen(row, len(table["columns"]), path)

    @parameterized.parameters("transfer", "matmul")
    def test_readme_agrees(self, name):
        full = data(name)
        rows = {row[0]: dict(zip(full["columns"], row, strict=True)) for row in full["rows"]}
        small = data(f"readme_{name}")
        self.assertNotEmpty(small["rows"])
        for cells in small["rows"]:
            row = dict(zip(small["columns"], cells, strict=True))
            shape = row.get("hidden, experts, top-k") or row["K → N, groups"]
            (source,) = (
                rows[key] for key in rows if key in (shape, f"4096, {shape}", f"32768, {shape}")
            )
            ours, _, ratio = source[row["operation"]].partition(" ")
            self.assertEqual(row["jax_ep"], ours)
            if "ratio to dense" in row:
                self.assertEqual(f"({row['ratio to dense']})", ratio)
            baseline = int(re.match(r"\d+", row["fastest baseline"])[0])
            self.assertEqual(baseline, self._fastest(name, row["operation"], source))
            larger, smaller = sorted((int(ours), baseline), reverse=True)
            self.assertEqual(row["speedup"], f"{larger / smaller:.2f}")

    def _fastest(self, name: str, operation: str, source: dict[str, str]) -> int:
        """Among the baselines of one row of the full table, for one operation."""
        if name == "matmul":
            index = ("forward", "input gradient", "weight gradient").index(operation)
            columns = ("torch `_grouped_mm`", "tokamax (Triton)")
            return max(int(source[column].split(", ")[index]) for column in columns)
        index = ("dispatch", "combine").index(operation)
        baselines = list(source.values())[-3:]  # two times each
        return min(int(times.split(", ")[index]) for times in baselines)


if __name__ == "__main__":
    absltest.main()
