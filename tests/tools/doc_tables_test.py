"""The tables of README.md and docs/ are those of docs/data/, and tools/doc_tables.py notices when they are not."""

from __future__ import annotations

import json
import pathlib
import tempfile

import tool
from absl.testing import absltest, parameterized

doc_tables = tool.load("doc_tables")

ALL = {
    "columns": ["shape", "ours", "a", "b"],
    "rows": [["4096, 8", "10 (0.95)", "25", "`b` 30"], ["64, 2", "7", "", "14"]],
}
EXCERPT = {
    "columns": ["hidden", "ours", "best", "speedup"],
    "rows": [["4096", "10", "25, `a`", "2.5"]],
    "excerpt_of": "all.json",
    "ratios": {"speedup": ["best", "ours"]},
}
PAGE = """# Page

<!-- from docs/data/all.json -->
| shape | ours | a | b |
|---|---|---|---|
| 4096, 8 | 10 (0.95) | 25 | `b` 30 |
| 64, 2 | 7 | | 14 |

<!-- from docs/data/excerpt.json -->
| hidden | ours | best | speedup |
|---|---|---|---|
| 4096 | 10 | 25, `a` | 2.5 |
After it.
"""


class RepositoryTest(absltest.TestCase):
    def test_tables_agree_with_their_sources(self):
        self.assertEqual(doc_tables.check(), [])


class ToolTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.root = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
        (self.root / "docs" / "data").mkdir(parents=True)
        (self.root / "README.md").write_text("# Without tables\n\n| a |\n|---|\n| 1 |\n")
        self.page = self.root / "docs" / "page.md"
        self.page.write_text(PAGE)
        self.source("all.json", ALL)
        self.source("excerpt.json", EXCERPT)

    def source(self, name: str, data: dict) -> None:
        (self.root / "docs" / "data" / name).write_text(json.dumps(data))

    def test_equal(self):
        self.assertEqual(doc_tables.check(self.root), [])
        doc_tables.write(self.root)
        self.assertEqual(self.page.read_text(), PAGE)

    @parameterized.parameters(
        ("| 25 |", "| 26 |"),
        ("| 64, 2 |", "| 64 |"),
        ("| ours | a |", "| ours | c |"),
        ("| 64, 2 | 7 | | 14 |\n", ""),
        ("| 64, 2 | 7 | | 14 |\n", "| 64, 2 | 7 | | 14 |\n| 64, 2 | 7 | | 14 |\n"),
    )
    def test_a_changed_page(self, old, new):
        self.page.write_text(PAGE.replace(old, new))
        (problem,) = doc_tables.check(self.root)
        self.assertStartsWith(problem, "docs/page.md:4: ")
        doc_tables.write(self.root)
        self.assertEqual(self.page.read_text(), PAGE)

    @parameterized.parameters(
        (["4096", "10", "25, `a`", "2.6"], "25 / 10 is 2.5, not 2.6"),
        (["4096", "10", "25, `a`", "4"], "25 / 10 is 2, not 4"),
        (["4096", "10", "fast", "2.5"], "has no numbers for a ratio"),
        (["4096", "11", "25, `a`", "2.3"], "no row of all.json has the figures"),
        (["4096", "7", "14, `b`", "2.0"], "no row of all.json has the figures"),
        (["4096", "10", "25"], "has not 4 cells"),
    )
    def test_a_wrong_source(self, row, expected):
        self.source("excerpt.json", EXCERPT | {"rows": [row]})
        (problem,) = doc_tables.check_source(self.root / "docs" / "data" / "excerpt.json")
        self.assertIn(expected, problem)

    def test_a_missing_source(self):
        (self.root / "docs" / "data" / "all.json").unlink()
        self.source("excerpt.json", {key: EXCERPT[key] for key in ("columns", "rows")})
        self.assertEqual(
            doc_tables.check(self.root), ["docs/page.md:4: docs/data/all.json does not exist"]
        )


if __name__ == "__main__":
    absltest.main()
