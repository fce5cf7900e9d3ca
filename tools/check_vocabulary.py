"""Finds words that this repository does not use, and comments that do not begin with a verb.

  tools/check_vocabulary.py [PATH...]    all files of the repository, or those below the paths

tools/vocabulary.toml lists the words, the field's words for them, and the first words that comments
shall not have. The exit status is 1 if a word is found, or too many such comments.
"""

from __future__ import annotations

import argparse
import ast
import collections
import dataclasses
import fnmatch
import pathlib
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
VOCABULARY = ROOT / "tools" / "vocabulary.toml"
C_SUFFIXES = (".c", ".cc", ".cu", ".cuh", ".h", ".pml")

# Stands for a space in a phrase: a phrase may go on in the next line of a comment.
_SPACE = r"(?:[ _-]|\s*\n[\s/#*]*)"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One word in one line."""

    path: str
    line: int
    text: str
    advice: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text!r}: {self.advice}"


@dataclasses.dataclass(frozen=True)
class Rule:
    """One entry of the vocabulary."""

    pattern: re.Pattern[str]
    use: str
    exceptions: tuple[str, ...] = ()

    @classmethod
    def parse(cls, entry: dict[str, Any]) -> Rule:
        """Returns the rule of an entry of vocabulary.toml."""
        patterns = [_phrase(words) for words in entry.get("words", ())] + entry.get("regex", [])
        combined = "|".join(f"(?:{_scoped(pattern)})" for pattern in patterns)
        return cls(re.compile(combined), entry["use"], tuple(entry.get("except", ())))

    def find(self, path: str, text: str) -> Iterator[Finding]:
        """Yields the places in a file that the rule is against."""
        if any(fnmatch.fnmatch(path, pattern) for pattern in self.exceptions):
            return
        for match in self.pattern.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            yield Finding(path, line, re.sub(r"\s*\n[\s/#*]*", " ", match[0]), self.use)


def _phrase(words: str) -> str:
    """Returns the pattern of a phrase: as words, as a_b and as AB, with a plural."""
    parts = [re.escape(part) for part in re.split(r"[ -]", words)]
    separated = rf"(?<![A-Za-z])(?i:{_SPACE.join(parts)}s?)(?![a-z])"
    camel = "".join(part.capitalize() for part in parts)
    return rf"{separated}|{camel}s?(?![a-z])"


def _scoped(pattern: str) -> str:
    """Returns a pattern whose leading (?i) holds for itself alone."""
    return rf"(?i:{pattern[4:]})" if pattern.startswith("(?i)") else pattern


# ---- comments


@dataclasses.dataclass(frozen=True, order=True)
class Comment:
    """A docstring, or the part of a comment that is in one line."""

    line: int
    text: str
    has_line: bool  # to itself, without code before it


def comments(path: str, text: str) -> Iterator[Comment]:
    """Yields the beginning of each comment: a whole line continues one in the line before."""
    if path.endswith(".md"):
        return
    if path.endswith(".py"):
        found = sorted([*_docstrings(text), *_python_comments(text)])
    elif path.endswith(C_SUFFIXES):
        found = list(_line_comments(text, r"(?:^|\s)(?://+|/\*+)\s*(.*)"))
    else:
        found = list(_line_comments(text, r"(?:^|\s)#+(?!!)\s+(.*)"))
    previous = -1
    for comment in found:
        if not comment.has_line or comment.line != previous + 1:
            yield comment
        previous = comment.line


def _python_comments(text: str) -> Iterator[Comment]:
    lines = iter(text.splitlines(keepends=True))
    for token in tokenize.generate_tokens(lambda: next(lines, "")):
        if token.type == tokenize.COMMENT:
            has_line = not token.line[: token.start[1]].strip()
            yield Comment(token.start[0], token.string.lstrip("#! "), has_line)


def _docstrings(text: str) -> Iterator[Comment]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                yield Comment(node.body[0].lineno, docstring, has_line=False)


def _line_comments(text: str, pattern: str) -> Iterator[Comment]:
    for number, line in enumerate(text.splitlines(), 1):
        if found := re.search(pattern, line):
            is_block = found[0].lstrip().startswith("/*")
            yield Comment(number, found[1], not line[: found.start()].strip() and not is_block)


def openings(path: str, text: str, words: list[str]) -> Iterator[Finding]:
    """Yields the comments that begin with one of the words."""
    pattern = re.compile(rf"(?:{'|'.join(words)})\b", re.IGNORECASE)
    for comment in comments(path, text):
        if pattern.match(comment.text):
            start = comment.text.split("\n")[0][:60]
            yield Finding(path, comment.line, start, "begin with a verb")


# ---- the repository


def files(paths: list[str], skip: list[str]) -> Iterator[tuple[str, str]]:
    """Yields the names and texts of the repository's files."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *paths]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in sorted(set(filter(None, listed.stdout.split("\0")))):
        path = ROOT / name
        if path.is_file() and not any(fnmatch.fnmatch(name, pattern) for pattern in skip):
            try:
                yield name, path.read_text()
            except UnicodeDecodeError:
                continue


def main(arguments: list[str] | None = None) -> int:
    """Prints what it finds. Returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*", help="files or folders, relative to the repository")
    paths = parser.parse_args(arguments).paths
    vocabulary = tomllib.loads(VOCABULARY.read_text())
    rules = [Rule.parse(entry) for entry in vocabulary["rules"]]
    words: list[Finding] = []
    first_words: list[Finding] = []
    for path, text in files(paths, vocabulary["skip"]):
        for rule in rules:
            words += rule.find(path, text)
        first_words += openings(path, text, vocabulary["openings"])
    for finding in [*words, *first_words]:
        print(finding)
    for advice, count in collections.Counter(finding.advice for finding in words).most_common():
        print(f"{count:5} x {advice}")
    allowed = vocabulary["max_openings"]
    print(
        f"{len(words)} words; {len(first_words)} comments do not begin with a verb ({allowed} may)"
    )
    return int(bool(words) or len(first_words) > allowed)


if __name__ == "__main__":
    sys.exit(main())
