"""Which figures of the docs are older than their kernels."""

from __future__ import annotations

import json
import pathlib
import subprocess
import tempfile

import tool
from absl.testing import absltest

figure_ages = tool.load("figure_ages")


class AgesTest(absltest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        self.git("init", "--quiet")
        (self.root / "docs" / "data").mkdir(parents=True)
        (self.root / "ffi").mkdir()
        self.first = self.change("ffi/copy.cu")
        self.table(recorded=f"2026-11-27, commit {self.first}", kernels=["ffi"])

    def git(self, *arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        command = ["git", *identity, *arguments]
        done = subprocess.run(command, cwd=self.root, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def change(self, name):
        with (self.root / name).open("a") as file:
            file.write("changed\n")
        self.git("add", name)
        self.git("commit", "--quiet", "--message", name)
        return self.git("rev-parse", "--short", "HEAD")

    def table(self, **entries):
        (self.root / "docs" / "data" / "copies.json").write_text(json.dumps(entries))

    def ages(self):
        found = figure_ages.figures(self.root)
        return {f.name: figure_ages.later_commits(f, self.root) for f in found}

    def test_later_commits_of_its_kernels_count(self):
        self.change("README.md")
        self.assertEqual(self.ages(), {"docs/data/copies.json": 0})
        self.change("ffi/copy.cu")
        self.change("ffi/other.cu")
        self.assertEqual(self.ages(), {"docs/data/copies.json": 2})

    def test_pictures(self):
        rows = [["a.png", f"2026-11-27, commit {self.first}", "ffi tests"]]
        (self.root / "docs" / "data" / "pictures.json").write_text(json.dumps({"rows": rows}))
        self.change("ffi/copy.cu")
        self.assertEqual(self.ages()["docs/images/a.png"], 1)

    def test_tables_without_kernels_have_no_age(self):
        self.table(rows=[])
        self.assertEmpty(self.ages())

    def test_errors_say_what_is_expected(self):
        for recorded, message in (
            ("yesterday", "copies.json: recorded is 'yesterday'; expected a date and a commit"),
            ("2026-11-27, commit 1234567", "Is the clone a shallow one?"),
        ):
            self.table(recorded=recorded, kernels=["ffi"])
            with self.assertRaisesRegex(ValueError, message.replace("?", r"\?")):
                self.ages()


class FiguresTest(absltest.TestCase):
    def test_every_measured_figure_says_what_it_shows(self):
        data = figure_ages.ROOT / "docs" / "data"
        known = {figure.name for figure in figure_ages.figures()}
        for path in data.glob("*.json"):
            table = json.loads(path.read_text())
            if path.name != "pictures.json" and "NVIDIA" in table["device"]:
                self.assertTrue("excerpt_of" in table or f"docs/data/{path.name}" in known, path)
        for figure in figure_ages.figures():
            self.assertTrue((figure_ages.ROOT / figure.name).exists(), figure.name)
            self.assertNotEmpty(figure.commit)
            for folder in figure.kernels:
                if not folder.startswith(":(exclude)"):
                    self.assertTrue((figure_ages.ROOT / folder).is_dir(), folder)


if __name__ == "__main__":
    absltest.main()
