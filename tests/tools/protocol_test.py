"""Spin checks the model of a transfer's flags: it holds in every setting, and fails in every mutation.

`tests/protocol/transfer.pml` is the model. Spin turns it into a C program that visits every reachable state.
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

# Defaults: an endless sequence of calls of the first seven operations (CALLS, FIRST, LAST), two resident
# blocks on rank 0 and one elsewhere. AND_RING adds the eighth operation, RING, which has the most states.
SETTINGS = {
    "two_ranks": {"RESIDENT_ELSEWHERE": 2},
    "one_resident_block": {"RESIDENT": 1, "AND_RING": 1},
    "three_ranks": {"RANKS": 3, "RESIDENT": 1, "LAST": 4, "AND_RING": 1},
    "three_ranks_and_one_has_two_blocks": {"RANKS": 3, "FIRST": 3, "LAST": 3},
    "a_rank_times_out_in_two_calls": {"TIMEOUTS": 1, "CALLS": 2, "FIRST": 2},
    "a_rank_times_out_in_three_calls": {"TIMEOUTS": 1, "CALLS": 3, "FIRST": 3, "LAST": 4},
    "a_rank_times_out_with_one_resident_block": {
        "TIMEOUTS": 1, "CALLS": 3, "FIRST": 3, "LAST": 6, "RESIDENT": 1
    },
    "one_of_three_ranks_times_out": {"TIMEOUTS": 1, "CALLS": 1, "RANKS": 3, "RESIDENT": 1},
    "one_of_three_ranks_times_out_and_one_has_two_blocks": {
        "TIMEOUTS": 1, "CALLS": 1, "RANKS": 3, "CHUNKS": 1, "FIRST": 1, "LAST": 1
    },
    "different_calls": {"MISMATCH": 1, "CALLS": 2, "LAST": 4},
    "different_calls_with_one_resident_block": {
        "MISMATCH": 1, "CALLS": 2, "RESIDENT": 1, "AND_RING": 1
    },
    "three_different_calls": {"MISMATCH": 1, "CALLS": 3, "FIRST": 3, "LAST": 4},
    "different_calls_of_three_ranks": {"MISMATCH": 1, "CALLS": 1, "RANKS": 3, "RESIDENT": 1},
    "receive_rings": {"AND_RING": 1, "FIRST": 2, "LAST": 3, "CHUNKS": 3},
    "a_rank_with_receive_rings_times_out": {
        "TIMEOUTS": 1, "CALLS": 2, "AND_RING": 1, "FIRST": 3, "LAST": 3, "RESIDENT": 1
    },
    "a_rank_with_receive_rings_and_two_blocks_times_out": {
        "TIMEOUTS": 1, "CALLS": 1, "FIRST": 8, "LAST": 8, "ITEMS": 1
    },
}  # fmt: skip

# How a mutation fails: a read finds wrong data, or no step is possible.
WRONG, STUCK = "assertion violated", "invalid end state"
REDISPATCH, COMBINE, DISPATCH, LOW_LATENCY, LOW_LATENCY_POISONED, POISONED, EMPTY, RING = (
    {"FIRST": n, "LAST": n} for n in (1, 2, 3, 4, 5, 6, 7, 8)
)
TIMES_OUT = {"TIMEOUTS": 1, "CALLS": 3}
ONE_BLOCK = {"FIRST": 4, "LAST": 5, "RESIDENT": 1}
RING_TIMES_OUT = RING | TIMES_OUT | {"RESIDENT": 1}
RING_OF_THREE_RANKS = RING | {"RANKS": 3, "RESIDENT": 1}
MUTATIONS = (
    ("NO_WAIT_ENTRY", WRONG, COMBINE),
    ("NO_WAIT_ENTRY", WRONG, DISPATCH),
    ("NO_WAIT_ENTRY", WRONG, LOW_LATENCY_POISONED | TIMES_OUT),
    ("NO_WAIT_CHUNK", WRONG, COMBINE),
    ("NO_WAIT_CHUNK", WRONG, DISPATCH),
    ("NO_WAIT_SEGMENT", WRONG, LOW_LATENCY),
    ("NO_WAIT_LOCAL", WRONG, COMBINE),
    ("NO_WAIT_LOCAL", WRONG, REDISPATCH),
    ("NO_WAIT_LOCAL", WRONG, DISPATCH),
    ("NO_WAIT_TILES", WRONG, DISPATCH),
    ("NO_WAIT_ITEMS", WRONG, DISPATCH),
    ("LOCAL_LAST", WRONG, DISPATCH | TIMES_OUT),
    ("NO_SIGNAL_ENTRY", STUCK, DISPATCH),
    ("NO_SIGNAL_ENTRY", STUCK, EMPTY),
    ("NO_SIGNAL_ENTRY", STUCK, LOW_LATENCY),
    ("NO_SIGNAL_CHUNK", STUCK, COMBINE),
    ("NO_SIGNAL_CHUNK", STUCK, DISPATCH),
    ("NO_SIGNAL_SEGMENT", STUCK, LOW_LATENCY),
    ("NO_SIGNAL_SEGMENT", WRONG, DISPATCH),
    ("EARLY_SIGNAL_CHUNK", WRONG, COMBINE),
    ("EARLY_SIGNAL_CHUNK", WRONG, DISPATCH),
    ("EARLY_SIGNAL_SEGMENT", WRONG, LOW_LATENCY),
    ("EARLY_SEQUENCE", WRONG, DISPATCH),
    ("EARLY_SEQUENCE", WRONG, LOW_LATENCY),
    ("FIRST_SIGNAL_CHUNK", WRONG, COMBINE),
    ("FIRST_SIGNAL_CHUNK", WRONG, DISPATCH),
    ("NO_FINGERPRINT", WRONG, SETTINGS["different_calls_with_one_resident_block"]),
    ("NO_POISONED", STUCK, POISONED),
    ("NO_POISONED", STUCK, ONE_BLOCK),
    ("NO_FAILURE_RECORD", WRONG, COMBINE | TIMES_OUT),
    ("NO_FAILURE_RECORD", WRONG, DISPATCH | TIMES_OUT),
    ("NO_FAILURE_RECORD", WRONG, LOW_LATENCY | TIMES_OUT),
    ("NO_ABORT", STUCK, DISPATCH | TIMES_OUT),
    ("NO_ABORT", STUCK, LOW_LATENCY | TIMES_OUT),
    ("NO_FORWARD_ABORT", WRONG, SETTINGS["one_of_three_ranks_times_out_and_one_has_two_blocks"]),
    ("NO_ABORT_CHECK", WRONG, LOW_LATENCY | TIMES_OUT),
    ("NO_ABORT_CHECK", WRONG, DISPATCH | TIMES_OUT),
    ("ENTER_ABORTED", WRONG, DISPATCH | TIMES_OUT),
    ("ENTER_ABORTED", WRONG, COMBINE | TIMES_OUT),
    ("ENTER_ABORTED", WRONG, LOW_LATENCY | TIMES_OUT),
    ("NO_PEER_CHECK", STUCK, ONE_BLOCK),
    ("NO_PEER_CHECK", STUCK, SETTINGS["different_calls_with_one_resident_block"]),
    ("ENTRY_BY_BLOCK", STUCK, ONE_BLOCK),
    ("ENTRY_LAST", STUCK, DISPATCH),
    ("NO_RESET", STUCK, DISPATCH),
    ("READS_FIRST", STUCK, COMBINE),
    ("EARLY_STORE", WRONG, COMBINE),
    ("EARLY_STORE", WRONG, DISPATCH),
    ("EARLY_ITEMS", WRONG, DISPATCH),
    ("EARLY_READ", WRONG, DISPATCH),
    ("ONLY_CHUNK_0", WRONG, COMBINE),
    ("ONLY_CHUNK_0", WRONG, DISPATCH),
    ("FAILED_STORES", WRONG, DISPATCH | TIMES_OUT),
    ("FAILED_NOT_COUNTED", STUCK, DISPATCH | TIMES_OUT),
    ("FAILED_COUNTED", WRONG, DISPATCH | TIMES_OUT),
    ("EMPTY_STORES", WRONG, EMPTY),
    ("FLAGS_FIRST", WRONG, DISPATCH | TIMES_OUT),
    ("SINGLE_ENTRY_BUFFER", WRONG, LOW_LATENCY | TIMES_OUT),
    ("SINGLE_ENTRY_BUFFER", WRONG, {"CALLS": 3, "FIRST": 3, "LAST": 4}),
    ("SINGLE_EAGER_BUFFER", WRONG, LOW_LATENCY | TIMES_OUT),
    ("SINGLE_COUNT_BUFFER", WRONG, {"CALLS": 3, "FIRST": 3, "LAST": 4}),
    ("COUNTS_WITH_ROWS", WRONG, {"FIRST": 2, "LAST": 3}),
    ("NO_WAIT_ENTRY", WRONG, RING),
    ("NO_WAIT_CHUNK", WRONG, RING),
    ("NO_SIGNAL_CHUNK", STUCK, RING),
    ("FIRST_SIGNAL_CHUNK", WRONG, RING),
    ("ONLY_CHUNK_0", WRONG, RING),
    ("NO_WAIT_CREDIT", WRONG, RING),
    ("NO_SIGNAL_CREDIT", STUCK, RING),
    ("EARLY_SIGNAL_CREDIT", WRONG, RING),
    ("FIRST_SIGNAL_CREDIT", WRONG, RING),
    ("CREDIT_TO_ONE_PEER", STUCK, RING_OF_THREE_RANKS),
    ("CREDIT_FROM_ONE_PEER", WRONG, RING_OF_THREE_RANKS),
    ("ONLY_CREDIT_0", WRONG, RING | {"CHUNKS": 3}),
    ("ANY_SEQUENCE_CREDIT", WRONG, RING),
    ("NO_RESET_CREDIT", STUCK, RING),
    ("LATE_CREDIT", STUCK, RING),
    ("CREDIT_IGNORES_ABORT", STUCK, RING_TIMES_OUT),
    ("FAILED_SENDS", WRONG, RING_TIMES_OUT),
    ("FAILED_SENT", WRONG, RING_TIMES_OUT),
    ("SENDS_FIRST", STUCK, RING),
    ("OWN_TICKETS", STUCK, RING),
)  # fmt: skip


def run(folder: pathlib.Path, *command: str, **environment: str) -> str:
    """Returns what the command prints."""
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
    """Returns the names of the model's mutations, by number."""
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
        """Returns what Spin prints for these settings. The checker is compiled once for all `broken`."""
        for program in ("spin", "gcc"):
            if shutil.which(program) is None:
                self.skipTest(f"{program} is not installed: apt-get install {program}")
        defines = [f"-D{name}={value}" for name, value in settings.items()]
        folder = self.folder / "".join([*defines, optimize])
        if not folder.exists():
            folder.mkdir()
            run(folder, "spin", "-a", *defines, str(MODEL))
            # Safety only. Unlike a bitstate search, this one stores whole states and visits every one.
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
        """The kernels carry exactly the WAIT_* and SIGNAL_* labels of the model."""

        def labels(text: str) -> set[str]:
            return set(re.findall(r"\b(?:WAIT|SIGNAL)_[A-Z]+\b", text))

        sources = "".join(path.read_text() for path in SOURCES.rglob("*.cu*"))
        self.assertNotEmpty(labels(sources))
        self.assertEqual(labels(sources), labels(MODEL.read_text()))


if __name__ == "__main__":
    absltest.main()
