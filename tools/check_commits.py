"""Checks the subjects of commits: `scope: say in the imperative what the commit does`.

  tools/check_commits.py [REVISIONS]    commits of a range for git log; default: the new ones

New are the commits after `SINCE`. A shallow clone that does not reach it has new commits only. The
exit status is 1 if a subject breaks the rule; CONTRIBUTING.md has the rule.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
SINCE = "472c65884f66c4e86ccede8260ed29b9b5a0ad96"  # older subjects stay as they are
MAX_LENGTH = 72

_SUBJECT = re.compile(r"[a-z0-9_][a-z0-9_./, -]*: (?P<text>\S.*)")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# First words of what states something, or only names it.
_OPENINGS = _words(
    "a all an and any as at both but by can each every few fewer for from he how if in is it its "
    "less many may more most must new no not of on one only she some that the their there these "
    "they this those three to two was we what when where which who whose why with you"
)
# Verbs end so as participles and in the third person, nouns in the plural.
_ENDINGS = re.compile(r"[a-z-]+(?:ing|ed|[^s]s)")
_IMPERATIVES = _words(
    "bias embed exceed feed focus need ping proceed ring seed shed speed spring string "
    "succeed swing weed"
)
# A statement has one of these verbs before any word that begins a clause.
_STATEMENT = _words("are has have is may must shall was were will")
_CLAUSES = _words(
    "after although as because before how if once since so than that though unless until what "
    "whatever when where whether which while who whose why"
)


def problem(subject: str) -> str | None:
    """Returns what is wrong with a subject, or None."""
    if len(subject) > MAX_LENGTH:
        return f"{len(subject)} characters; expected at most {MAX_LENGTH}"
    matched = _SUBJECT.fullmatch(subject)
    if matched is None:
        return "no scope; expected `scope: imperative ...` with a scope in lower case"
    if subject.endswith("."):
        return "ends with a period; expected none"
    words = re.findall(r"[\w'-]+", matched["text"])
    first = words[0] if words else ""
    if not re.fullmatch(r"[a-z][a-z-]*", first):
        return f"begins with {first!r}; expected a verb in lower case"
    if first in _OPENINGS or (_ENDINGS.fullmatch(first) and first not in _IMPERATIVES):
        return f"begins with {first!r}; expected a verb in the imperative, as in `add ...`"
    for word in words:
        if word in _CLAUSES:
            break
        if word in _STATEMENT:
            return f"states what {word!r}; expected the imperative, as in `add ...`"
    return None


def subjects(revisions: str | None = None, root: pathlib.Path = ROOT) -> list[tuple[str, str]]:
    """Returns the short hashes and subjects of the commits of a range, or of the new ones.

    Subjects that git gave to merges are left out. In a shallow clone git does not know the parents
    of the oldest commits, which may be merges.
    """
    if revisions is None:
        known = _git(root, "cat-file", "-e", f"{SINCE}^{{commit}}").returncode == 0
        shallow = _git(root, "rev-parse", "--is-shallow-repository").stdout.strip() == "true"
        if not known and not shallow:
            raise RuntimeError(
                f"this repository does not have {SINCE}; expected the commit after which subjects "
                "are checked: name it in tools/check_commits.py"
            )
        revisions = f"{SINCE}..HEAD" if known else "HEAD"
    log = _git(root, "log", "--format=%h%x09%p%x09%s", revisions, "--")
    if log.returncode:
        raise RuntimeError(f"git log {revisions}: {log.stderr.strip()}")
    commits = [line.split("\t", 2) for line in log.stdout.splitlines()]
    return [
        (commit, subject)
        for commit, parents, subject in commits
        if not (subject.startswith("Merge ") and len(parents.split()) != 1)
    ]


def _git(root: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False
    )


def main() -> int:
    """Prints each subject that breaks the rule."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("revisions", nargs="?", help="a range for git log")
    checked = subjects(parser.parse_args().revisions)
    wrong = [(commit, subject, problem(subject)) for commit, subject in checked]
    wrong = [entry for entry in wrong if entry[2]]
    for commit, subject, reason in wrong:
        print(f"{commit} {subject!r}: {reason}")
    print(f"{len(checked)} subjects of commits, {len(wrong)} break the rule of CONTRIBUTING.md")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
