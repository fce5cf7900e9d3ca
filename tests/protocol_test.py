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

TESTS = pathlib.Path(__file__).resolve().parent
MODEL = TESTS / "protocol" / "transfer.pml"
SOURCES = TESTS.parent / "ffi"
MEMORY_MB = 1500

# Calls without end, one of five operations each, unless CALLS, FIRST and LAST say otherwise. RESIDENT is 2 and RESIDENT_ELSEWHERE 1.
SETTINGS = {
    "two_ranks": {},
    "two_blocks_on_both_ranks": {"RESIDENT_ELSEWHERE": 2, "FIRST": 2, "LAST": 3},
    "one_resident_block": {"RESIDENT": 1},
    "three_ranks": {"RANKS": 3, "RESIDENT": 1},
    "a_rank_gives_up": {"TIMEOUTS": 1, "CALLS": 1},
    "a_rank_gives_up_in_two_calls": {"TIMEOUTS": 1, "CALLS": 2, "LAST": 3},
    "one_of_three_ranks_gives_up": {"TIMEOUTS": 1, "CALLS": 1, "RANKS": 3, "RESIDENT": 1},
    "different_calls": {"MISMATCH": 1, "CALLS": 2, "LAST": 3},
    "different_calls_of_three_ranks": {
        "MISMATCH": 1, "CALLS": 1, "LAST": 3, "RANKS": 3, "RESIDENT": 1
    },
}  # fmt: skip

# How each mutation shows: something wrong was read or overwritten, or nobody can go on.
WRONG, STUCK = "assertion violated", "invalid end state"
IN_PLACE, COPIED, COMBINE, POISONED = ({"FIRST": n, "LAST": n} for n in (1, 2, 3, 5))
GIVES_UP = SETTINGS["a_rank_gives_up"]
MUTATIONS = (
    ("NO_WAIT_FREE", WRONG, COPIED),
    ("NO_WAIT_FREE", WRONG, COMBINE),
    ("NO_WAIT_READY", WRONG, IN_PLACE),
    ("NO_WAIT_READY", STUCK, POISONED),
    ("NO_WAIT_CHUNK", WRONG, COMBINE),
    ("NO_WAIT_LOCAL", WRONG, COPIED),
    ("NO_WAIT_LOCAL", WRONG, COMBINE),
    ("NO_WAIT_DONE", WRONG, IN_PLACE),
    ("NO_SIGNAL_READY", STUCK, COPIED),
    ("NO_SIGNAL_CHUNK", STUCK, COMBINE),
    ("NO_SIGNAL_DONE", STUCK, COPIED),
    ("EARLY_SIGNAL_READY", WRONG, COPIED),
    ("EARLY_SIGNAL_CHUNK", WRONG, COMBINE),
    ("EARLY_SIGNAL_DONE", WRONG, COPIED),
    ("EARLY_EPOCH", WRONG, COMBINE),
    ("FIRST_SIGNAL_READY", WRONG, COPIED),
    ("FIRST_SIGNAL_CHUNK", WRONG, COMBINE),
    ("FIRST_SIGNAL_DONE", WRONG, COPIED),
    ("ONE_PEER_FREE", WRONG, SETTINGS["three_ranks"]),
    ("NO_FINGERPRINT", WRONG, SETTINGS["different_calls"]),
    ("NO_POISONED", STUCK, POISONED),
    ("NO_VERDICT", WRONG, GIVES_UP),
    ("NO_ABORT", STUCK, GIVES_UP),
    ("NO_PASSING_ON", WRONG, SETTINGS["one_of_three_ranks_gives_up"]),
    ("NO_LAST_LOOK", WRONG, GIVES_UP),
    ("NO_RESET", STUCK, COPIED),
    ("READS_FIRST", STUCK, COPIED | {"RESIDENT": 1}),
    ("EARLY_STORE", WRONG, COPIED),
    ("EARLY_STORE", WRONG, COMBINE),
    ("FLAGS_FIRST", WRONG, SETTINGS["a_rank_gives_up_in_two_calls"]),
)  # fmt: skip


def check(folder: str, settings: dict[str, int | str], optimize: str) -> str:
    """What the checker prints about the model with these settings."""

    def run(*command: str) -> str:
        done = subprocess.run(
            command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: status {done.returncode}\n{done.stdout}")
        return done.stdout

    run("spin", "-a", *(f"-D{name}={value}" for name, value in settings.items()), str(MODEL))
    # Safety only, states compressed without loss; unlike a bitstate search this one visits every state.
    limits = f"-DMEMLIM={MEMORY_MB}"
    run("gcc", optimize, "-w", "-DSAFETY", "-DCOLLAPSE", limits, "-o", "pan", "pan.c")
    return run("timeout", "300", "./pan", "-m500000", "-w24")


class ProtocolTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        if os.environ.get("JAX_EP_WITHOUT_SPIN") == "1":
            self.skipTest("JAX_EP_WITHOUT_SPIN=1: the model of the flags is not checked")
        for need in ("spin", "gcc"):
            if shutil.which(need) is None:
                self.fail(
                    f"{need} is not installed: apt-get install {need}, or set JAX_EP_WITHOUT_SPIN=1"
                )

    def check(self, settings: dict[str, int | str], optimize: str) -> str:
        with tempfile.TemporaryDirectory() as folder:
            return check(folder, settings, optimize)

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
        printed = self.check(settings | {"BROKEN": name}, "-O0")
        self.assertRegex(printed, rf"(?m)^pan:1: {error}")
        self.assertIn("errors: 1", printed)

    def test_every_mutation_of_the_model_is_tried(self):
        section = MODEL.read_text().partition("---- Mutations")[2].partition("#ifndef BROKEN")[0]
        names = re.findall(r"#define (\w+) \d+", section)
        self.assertEqual(names[0], "NOTHING")
        self.assertEqual(list(dict.fromkeys(name for name, *_ in MUTATIONS)), names[1:])

    def test_the_kernels_carry_the_labels_of_the_model(self):
        """Every wait and signal of the model stands in the kernels, and none that it does not know."""

        def labels(text: str) -> set[str]:
            return set(re.findall(r"\b(?:WAIT|SIGNAL)_[A-Z]+\b", text))

        sources = "".join(path.read_text() for path in SOURCES.rglob("*.cu*"))
        self.assertNotEmpty(labels(sources))
        self.assertEqual(labels(sources), labels(MODEL.read_text()))


if __name__ == "__main__":
    absltest.main()
