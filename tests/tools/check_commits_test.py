"""tools/check_commits.py: which subjects break the rule, and which commits are new in any clone."""

from __future__ import annotations

import pathlib
import subprocess
import tempfile
import unittest.mock

import tool
from absl.testing import absltest, parameterized

check_commits = tool.load("check_commits")


class SubjectTest(parameterized.TestCase):
    @parameterized.parameters(
        "transfer: return credits before the last chunk",
        "tests/cpp: compare redispatch with dispatch",
        "nnx, linen: pass a mask to every layer",
        "gpu_check.sh: feed the record to the next run",
        "docs: say what is compiled, and when it was measured",
        "bias: need no column where a group has none",
        "matmul: " + "x" * 64,
    )
    def test_right(self, subject):
        self.assertIsNone(check_commits.problem(subject))

    @parameterized.parameters(
        ("matmul: " + "x" * 65, "73 characters"),
        ("return credits before the last chunk", "no scope"),
        ("Transfer: return credits", "no scope"),
        ("MoE: run checkpoints", "no scope"),
        ("transfer:return credits", "no scope"),
        ("transfer: return credits.", "period"),
        ("transfer: Return credits", "verb in lower case"),
        ("tests: 16-bit matmuls run on the emulator", "verb in lower case"),
        ("transfer: returned credits", "'returned'"),
        ("transfer: returning credits", "'returning'"),
        ("transfer: returns credits", "'returns'"),
        ("transfer: the last chunk returns credits", "'the'"),
        ("docs: what a chunk returns", "'what'"),
        ("runtime: memory that ends is an error", None),
        ("transfer: credit is returned before it is used", "'is'"),
        ("layers: sharded weights have a class", "'sharded'"),
        ("", "no scope"),
        ("docs: ...", "period"),
        ("docs: ..!", "verb"),
    )
    def test_wrong(self, subject, expected):
        problem = check_commits.problem(subject)
        if expected is None:  # only a reader can tell
            self.assertIsNone(problem)
        else:
            self.assertIn(expected, problem)


class CommitsTest(absltest.TestCase):
    """In repositories as CI and developers have them."""

    def setUp(self):
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name) / "origin"
        self.root.mkdir()
        self.git("init", "--quiet", "--initial-branch=main")
        self.commit("Older subjects may say anything.")
        self.since = self.git("rev-parse", "HEAD")
        self.commit("a: add b")
        self.git("checkout", "--quiet", "-b", "side")
        self.commit("c: Wrong")
        self.git("checkout", "--quiet", "main")
        self.commit("d: add e")
        self.git("merge", "--quiet", "--no-ff", "--no-edit", "side")
        self.enterContext(unittest.mock.patch.object(check_commits, "SINCE", self.since))

    def git(self, *arguments: str, root: pathlib.Path | None = None) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        command = ["git", "-C", str(root or self.root), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def commit(self, subject: str) -> None:
        self.git("commit", "--quiet", "--allow-empty", "-m", subject)

    def clone(self, depth: int) -> pathlib.Path:
        path = self.root.with_name(f"depth_{depth}")
        self.git("clone", "--quiet", f"--depth={depth}", self.root.as_uri(), str(path))
        return path

    def subjects(self, root: pathlib.Path) -> list[str]:
        return sorted(subject for _, subject in check_commits.subjects(root=root))

    def test_new_ones_but_the_merge(self):
        self.assertEqual(self.subjects(self.root), ["a: add b", "c: Wrong", "d: add e"])

    def test_a_clone_of_a_merge_alone(self):
        self.assertEqual(self.subjects(self.clone(1)), [])

    def test_a_shallow_clone(self):
        self.assertEqual(self.subjects(self.clone(2)), ["c: Wrong", "d: add e"])

    def test_a_range(self):
        found = [subject for _, subject in check_commits.subjects("HEAD^..HEAD^2", self.root)]
        self.assertEqual(found, ["c: Wrong"])
        with self.assertRaisesRegex(RuntimeError, "git log nothing"):
            check_commits.subjects("nothing", self.root)

    def test_another_history(self):
        with (
            unittest.mock.patch.object(check_commits, "SINCE", "0" * 40),
            self.assertRaisesRegex(RuntimeError, "expected the commit after which"),
        ):
            check_commits.subjects(root=self.root)


if __name__ == "__main__":
    absltest.main()
