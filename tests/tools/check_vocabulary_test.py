"""tools/check_vocabulary.py: words are found in any spelling, and comments by how they begin."""

from __future__ import annotations

import fnmatch
import re
import textwrap
import tomllib

import tool
from absl.testing import absltest, parameterized

check_vocabulary = tool.load("check_vocabulary")
VOCABULARY = tomllib.loads(check_vocabulary.VOCABULARY.read_text())
RULE = check_vocabulary.Rule.parse(
    {"words": ["copy engine"], "regex": [r"\bSite\b", r"(?i)\blate\b"], "use": "TMA", "except": ["docs/*"]}
)  # fmt: skip


def words(text: str, path: str = "a.cc") -> list[tuple[int, str]]:
    return [(finding.line, finding.text) for finding in RULE.find(path, text)]


class WordsTest(parameterized.TestCase):
    @parameterized.parameters(
        ("a copy engine", "copy engine"),
        ("Copy engines.", "Copy engines"),
        ("num_copy_engines = 2", "copy_engines"),
        ("class CopyEngine {", "CopyEngine"),
        ("copy-engine", "copy-engine"),
        ("a copy\n  // engine", "copy engine"),
        ("a copy\n# engine", "copy engine"),
        ("the Site", "Site"),
        ("too LATE", "LATE"),
    )
    def test_found(self, text, expected):
        self.assertEqual(words(text), [(1, expected)])

    @parameterized.parameters(
        "scopy engine", "copy engineer", "copies engines", "website", "CallSite", "the site", "later"
    )  # fmt: skip
    def test_not_found(self, text):
        self.assertEqual(words(text), [])

    def test_the_line_and_the_exceptions(self):
        text = "one\ntwo\nthe copy engine\n"
        self.assertEqual(words(text), [(3, "copy engine")])
        self.assertEqual(words(text, "docs/lab_notes.md"), [])

    def test_every_rule_of_the_list_has_an_advice_and_finds_its_own_words(self):
        for entry in VOCABULARY["rules"]:
            rule = check_vocabulary.Rule.parse(entry)
            self.assertNotEmpty(rule.use)
            for phrase in entry.get("words", ()):
                self.assertLen(list(rule.find("a.cc", f"the {phrase} here")), 1, phrase)
            for phrase in entry.get("regex", ()):
                re.compile(phrase)

    def test_every_exception_is_one(self):
        """It names files that have a word of its rule."""
        texts = dict(check_vocabulary.files([], VOCABULARY["skip"]))
        for entry in VOCABULARY["rules"]:
            rule = check_vocabulary.Rule.parse(entry | {"except": []})
            for pattern in entry.get("except", ()):
                found = [rule.find(name, texts[name]) for name in fnmatch.filter(texts, pattern)]
                self.assertTrue(any(map(list, found)), f"{pattern}: {rule.use}")


class OpeningsTest(parameterized.TestCase):
    def found(self, path: str, text: str) -> list[int]:
        found = check_vocabulary.openings(path, textwrap.dedent(text), VOCABULARY["openings"])
        return [finding.line for finding in found]

    def test_python(self):
        text = '''\
            """What a module is."""
            import os  # by name
            # Returns something
            # of a line that goes on.

            # Of something.
            def f():
                """Whoever calls this."""
                return "# that is text"

            def g():
                """By one thread."""
            '''
        self.assertEqual(self.found("a.py", text), [1, 2, 6, 12])

    def test_cpp(self):
        text = """\
            // Of a tile.
            // That is more of it.
            int a;  // that is set
            /* Who calls this. */
            const char* url = "https://of";
            // Offset of the tile.
            """
        self.assertEqual(self.found("a.cuh", text), [1, 3, 4])

    @parameterized.parameters(".ci/run", "CMakeLists.txt", "a.toml", "BUILD.bazel")
    def test_other_files(self, path):
        self.assertEqual(self.found(path, "#!/bin/sh\n# What it is.\na # of b\n\nx#of\n"), [2, 3])

    def test_prose_is_not_a_comment(self):
        self.assertEqual(self.found("README.md", "# What it is\n"), [])


class CommandTest(absltest.TestCase):
    def test_all_files_of_the_repository_can_be_read(self):
        names = [name for name, _ in check_vocabulary.files([], VOCABULARY["skip"])]
        self.assertContainsSubset(["README.md", "jax_ep/__init__.py", "ffi/bindings.cc"], names)
        self.assertNotIn("LICENSE", names)
        self.assertEqual(
            [name for name, _ in check_vocabulary.files(["ffi/bindings.cc"], [])],
            ["ffi/bindings.cc"],
        )


if __name__ == "__main__":
    absltest.main()
