"""The flags of a transfer, as Spin sees them: the model holds in every setting, and not when it is broken in any one place.

`protocol/transfer.pml` is the model. Here it becomes a C program, which looks at every state that the ranks can reach.
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import tempfile

from absl.testing import absltest, parameterized

TESTS = pathlib.Path(__file__).resolve().parents[1]
MODEL = TESTS / "protocol" / "transfer.pml"
SOURCES = TESTS.parent / "ffi"
MEMORY_MB = 1500

# Calls without end, one of seven operations each, unless CALLS, FIRST and LAST say otherwise. RESIDENT is 2 and RESIDENT_ELSEWHERE 1.
# The eighth operation, WINDOWED, is among them with AND_WINDOWED: it has the most states.
SETTINGS = {
    "two_ranks": {"RESIDENT_ELSEWHERE": 2},
    "one_resident_block": {"RESIDENT": 1, "AND_WINDOWED": 1},
    "three_ranks": {"RANKS": 3, "RESIDENT": 1, "LAST": 4, "AND_WINDOWED": 1},
    "three_ranks_and_one_has_two_blocks": {"RANKS": 3, "FIRST": 3, "LAST": 3},
    "a_rank_gives_up_in_two_calls": {"TIMEOUTS": 1, "CALLS": 2, "FIRST": 2},
    "a_rank_gives_up_in_three_calls": {"TIMEOUTS": 1, "CALLS": 3, "FIRST": 3, "LAST": 4},
    "a_rank_gives_up_with_one_resident_block": {
        "TIMEOUTS": 1, "CALLS": 3, "FIRST": 3, "LAST": 6, "RESIDENT": 1
    },
    "one_of_three_ranks_gives_up": {"TIMEOUTS": 1, "CALLS": 1, "RANKS": 3, "RESIDENT": 1},
    "one_of_three_ranks_gives_up_and_one_has_two_blocks": {
        "TIMEOUTS": 1, "CALLS": 1, "RANKS": 3, "CHUNKS": 1, "FIRST": 1, "LAST": 1
    },
    "different_calls": {"MISMATCH": 1, "CALLS": 2, "LAST": 4},
    "different_calls_with_one_resident_block": {
        "MISMATCH": 1, "CALLS": 2, "RESIDENT": 1, "AND_WINDOWED": 1
    },
    "three_different_calls": {"MISMATCH": 1, "CALLS": 3, "FIRST": 3, "LAST": 4},
    "different_calls_of_three_ranks": {"MISMATCH": 1, "CALLS": 1, "RANKS": 3, "RESIDENT": 1},
    "windows": {"AND_WINDOWED": 1, "FIRST": 2, "LAST": 3, "CHUNKS": 3},
    "a_rank_with_windows_gives_up": {
        "TIMEOUTS": 1, "CALLS": 2, "AND_WINDOWED": 1, "FIRST": 3, "LAST": 3, "RESIDENT": 1
    },
    "a_rank_with_windows_and_two_blocks_gives_up": {
        "TIMEOUTS": 1, "CALLS": 1, "FIRST": 8, "LAST": 8, "PARTS": 1
    },
}  # fmt: skip

# How each mutation shows: something wrong was read or overwritten, or nobody can go on.
WRONG, STUCK = "assertion violated", "invalid end state"
BY_PLAN, COMBINE, DISPATCH, SMALL, SMALL_POISONED, POISONED, EMPTY, WINDOWED = (
    {"FIRST": n, "LAST": n} for n in (1, 2, 3, 4, 5, 6, 7, 8)
)
GIVES_UP = {"TIMEOUTS": 1, "CALLS": 3}
ONE_BLOCK = {"FIRST": 4, "LAST": 5, "RESIDENT": 1}
WINDOWED_GIVES_UP = WINDOWED | GIVES_UP | {"RESIDENT": 1}
WINDOWS_OF_THREE = WINDOWED | {"RANKS": 3, "RESIDENT": 1}
MUTATIONS = (
    ("NO_WAIT_ENTRY", WRONG, COMBINE),
    ("NO_WAIT_ENTRY", WRONG, DISPATCH),
    ("NO_WAIT_ENTRY", WRONG, SMALL_POISONED | GIVES_UP),
    ("NO_WAIT_CHUNK", WRONG, COMBINE),
    ("NO_WAIT_CHUNK", WRONG, DISPATCH),
    ("NO_WAIT_SEGMENT", WRONG, SMALL),
    ("NO_WAIT_LOCAL", WRONG, COMBINE),
    ("NO_WAIT_LOCAL", WRONG, BY_PLAN),
    ("NO_WAIT_LOCAL", WRONG, DISPATCH),
    ("NO_WAIT_TILES", WRONG, DISPATCH),
    ("NO_WAIT_PARTS", WRONG, DISPATCH),
    ("LOCAL_LAST", WRONG, DISPATCH | GIVES_UP),
    ("NO_SIGNAL_ENTRY", STUCK, DISPATCH),
    ("NO_SIGNAL_ENTRY", STUCK, EMPTY),
    ("NO_SIGNAL_ENTRY", STUCK, SMALL),
    ("NO_SIGNAL_CHUNK", STUCK, COMBINE),
    ("NO_SIGNAL_CHUNK", STUCK, DISPATCH),
    ("NO_SIGNAL_SEGMENT", STUCK, SMALL),
    ("NO_SIGNAL_SEGMENT", WRONG, DISPATCH),
    ("EARLY_SIGNAL_CHUNK", WRONG, COMBINE),
    ("EARLY_SIGNAL_CHUNK", WRONG, DISPATCH),
    ("EARLY_SIGNAL_SEGMENT", WRONG, SMALL),
    ("EARLY_SEQUENCE", WRONG, DISPATCH),
    ("EARLY_SEQUENCE", WRONG, SMALL),
    ("FIRST_SIGNAL_CHUNK", WRONG, COMBINE),
    ("FIRST_SIGNAL_CHUNK", WRONG, DISPATCH),
    ("NO_FINGERPRINT", WRONG, SETTINGS["different_calls_with_one_resident_block"]),
    ("NO_POISONED", STUCK, POISONED),
    ("NO_POISONED", STUCK, ONE_BLOCK),
    ("NO_NOTE", WRONG, COMBINE | GIVES_UP),
    ("NO_NOTE", WRONG, DISPATCH | GIVES_UP),
    ("NO_NOTE", WRONG, SMALL | GIVES_UP),
    ("NO_ABORT", STUCK, DISPATCH | GIVES_UP),
    ("NO_ABORT", STUCK, SMALL | GIVES_UP),
    ("NO_PASSING_ON", WRONG, SETTINGS["one_of_three_ranks_gives_up_and_one_has_two_blocks"]),
    ("NO_LOOK", WRONG, SMALL | GIVES_UP),
    ("NO_LOOK", WRONG, DISPATCH | GIVES_UP),
    ("ENTER_ANYWAY", WRONG, DISPATCH | GIVES_UP),
    ("ENTER_ANYWAY", WRONG, COMBINE | GIVES_UP),
    ("ENTER_ANYWAY", WRONG, SMALL | GIVES_UP),
    ("NO_LINE_LOOK", STUCK, ONE_BLOCK),
    ("NO_LINE_LOOK", STUCK, SETTINGS["different_calls_with_one_resident_block"]),
    ("ENTRY_BY_BLOCK", STUCK, ONE_BLOCK),
    ("ENTRY_LAST", STUCK, DISPATCH),
    ("NO_RESET", STUCK, DISPATCH),
    ("READS_FIRST", STUCK, COMBINE),
    ("EARLY_STORE", WRONG, COMBINE),
    ("EARLY_STORE", WRONG, DISPATCH),
    ("EARLY_PARTS", WRONG, DISPATCH),
    ("EARLY_READ", WRONG, DISPATCH),
    ("CHUNK_0_ALONE", WRONG, COMBINE),
    ("CHUNK_0_ALONE", WRONG, DISPATCH),
    ("FAILED_STORES", WRONG, DISPATCH | GIVES_UP),
    ("FAILED_NOT_COUNTED", STUCK, DISPATCH | GIVES_UP),
    ("FAILED_COUNTED", WRONG, DISPATCH | GIVES_UP),
    ("EMPTY_STORES", WRONG, EMPTY),
    ("FLAGS_FIRST", WRONG, DISPATCH | GIVES_UP),
    ("ONE_LINE", WRONG, SMALL | GIVES_UP),
    ("ONE_LINE", WRONG, {"CALLS": 3, "FIRST": 3, "LAST": 4}),
    ("ONE_HALF", WRONG, SMALL | GIVES_UP),
    ("ONE_COUNTS_HALF", WRONG, {"CALLS": 3, "FIRST": 3, "LAST": 4}),
    ("COUNTS_AMONG_ROWS", WRONG, {"FIRST": 2, "LAST": 3}),
    ("NO_WAIT_ENTRY", WRONG, WINDOWED),
    ("NO_WAIT_CHUNK", WRONG, WINDOWED),
    ("NO_SIGNAL_CHUNK", STUCK, WINDOWED),
    ("FIRST_SIGNAL_CHUNK", WRONG, WINDOWED),
    ("CHUNK_0_ALONE", WRONG, WINDOWED),
    ("NO_WAIT_CREDIT", WRONG, WINDOWED),
    ("NO_SIGNAL_CREDIT", STUCK, WINDOWED),
    ("EARLY_SIGNAL_CREDIT", WRONG, WINDOWED),
    ("FIRST_SIGNAL_CREDIT", WRONG, WINDOWED),
    ("ONE_TOLD_CREDIT", STUCK, WINDOWS_OF_THREE),
    ("ONE_CREDIT", WRONG, WINDOWS_OF_THREE),
    ("CREDIT_0_ALONE", WRONG, WINDOWED | {"CHUNKS": 3}),
    ("ANY_SEQUENCE_CREDIT", WRONG, WINDOWED),
    ("NO_RESET_CREDIT", STUCK, WINDOWED),
    ("LATE_CREDIT", STUCK, WINDOWED),
    ("CREDIT_UNHEARD", STUCK, WINDOWED_GIVES_UP),
    ("FAILED_SENDS", WRONG, WINDOWED_GIVES_UP),
    ("FAILED_SENT", WRONG, WINDOWED_GIVES_UP),
    ("SENDS_FIRST", STUCK, WINDOWED),
    ("OWN_TICKETS", STUCK, WINDOWED),
)  # fmt: skip


def run(folder: pathlib.Path, *command: str, **environment: str) -> str:
    """What the command prints."""
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: status {done.returncode}\n{done.stdout}")
    return done.stdout


def mutations() -> list[str]:
    """Their names in the model, by number."""
    section = MODEL.read_text().partition("---- Mutations")[2].partition("#ifndef BROKEN")[0]
    names = re.findall(r"#define (\w+) (\d+)", section)
    assert [int(number) for _, number in names] == list(range(len(names)))
    return [name for name, _ in names]


class ProtocolTest(parameterized.TestCase):
    folder: pathlib.Path

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)

    def check(self, settings: dict[str, int | str], optimize: str, broken: int = 0) -> str:
        """What the checker prints about the model with these settings. It is compiled once for all `broken`."""
        for program in ("spin", "gcc"):
            if shutil.which(program) is None:
                self.skipTest(f"{program} is not installed: apt-get install {program}")
        defines = [f"-D{name}={value}" for name, value in settings.items()]
        folder = self.folder / "".join([*defines, optimize])
        if not folder.exists():
            folder.mkdir()
            run(folder, "spin", "-a", *defines, str(MODEL))
            # Safety only. States are kept whole; unlike a bitstate search this one visits every state.
            limits = f"-DMEMLIM={MEMORY_MB}"
            run(folder, "gcc", optimize, "-w", "-DSAFETY", limits, "-o", "pan", "pan.c")
        return run(folder, "timeout", "300", "./pan", "-m500000", "-w22", BROKEN=str(broken))

    @parameterized.named_parameters(*SETTINGS.items())
    def test_the_protocol_holds(self, settings):
        printed = self.check(settings, "-O1")
        self.assertIn("errors: 0", printed)
        self.assertNotIn("max search depth too small", printed)
        self.assertNotIn("out of memory", printed)
        self.assertNotIn("Search not completed", printed)
        states = re.search(r"(\d\S*) states, stored", printed)
        self.assertIsNotNone(states, printed)
        print(f"{settings}: {states[1]} states")

    @parameterized.parameters(*MUTATIONS)
    def test_a_broken_protocol_fails(self, name, error, settings):
        number = mutations().index(name)
        printed = self.check(settings | {"BROKEN": "broken"}, "-O0", number)
        self.assertRegex(printed, rf"(?m)^pan:1: {error}")
        self.assertIn("errors: 1", printed)

    def test_every_mutation_of_the_model_is_tried(self):
        self.assertEqual(mutations()[0], "NOTHING")
        self.assertEqual(list(dict.fromkeys(name for name, *_ in MUTATIONS)), mutations()[1:])

    def test_the_kernels_carry_the_labels_of_the_model(self):
        """Every wait and signal of the model stands in the kernels, and none that it does not know."""

        def labels(text: str) -> set[str]:
            return set(re.findall(r"\b(?:WAIT|SIGNAL)_[A-Z]+\b", text))

        sources = "".join(path.read_text() for path in SOURCES.rglob("*.cu*"))
        self.assertNotEmpty(labels(sources))
        self.assertEqual(labels(sources), labels(MODEL.read_text()))


if __name__ == "__main__":
    absltest.main()
