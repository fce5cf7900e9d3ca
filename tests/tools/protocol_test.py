"""Spin checks the models of the protocol: each holds in every setting, and fails in every mutation.

The models are in `tests/protocol/`. Spin turns one into a C program that visits every reachable state.
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import tempfile

import protocol_models
from absl.testing import absltest, parameterized

TESTS = pathlib.Path(__file__).resolve().parents[1]
SOURCES = TESTS.parent / "ffi"
MEMORY_MB = 1500

MODELS = protocol_models.MODELS
SETTINGS = [
    (setting, name, settings)
    for name, model in MODELS.items()
    for setting, settings in model.settings.items()
]
MUTATIONS = [(name, *mutation) for name, model in MODELS.items() for mutation in model.mutations]


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


def text(name: str) -> str:
    """Returns the text of a model."""
    return (TESTS / "protocol" / f"{name}.pml").read_text()


def mutations(name: str) -> list[str]:
    """Returns the names of a model's mutations, by number."""
    section = text(name).partition("---- Mutations")[2].partition("#ifndef BROKEN")[0]
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

    def check(self, name: str, settings: dict, optimize: str, broken: int = 0) -> str:
        """Returns what Spin prints for a model with these settings. The checker is compiled once for all `broken`."""
        for program in ("spin", "gcc"):
            if shutil.which(program) is None:
                self.skipTest(f"{program} is not installed: apt-get install {program}")
        defines = [f"-D{macro}={value}" for macro, value in settings.items()]
        folder = self.folder / "".join([name, *defines, optimize])
        if not folder.exists():
            folder.mkdir()
            run(folder, "spin", "-a", *defines, str(TESTS / "protocol" / f"{name}.pml"))
            # Safety only. Unlike a bitstate search, this one stores whole states and visits every one.
            limits = f"-DMEMLIM={MEMORY_MB}"
            run(folder, "gcc", optimize, "-w", "-DSAFETY", limits, "-o", "pan", "pan.c")
        return run(folder, "timeout", "300", "./pan", "-m500000", "-w22", BROKEN=str(broken))

    @parameterized.named_parameters(*SETTINGS)
    def test_the_protocol_holds(self, name, settings):
        printed = self.check(name, settings, "-Og")
        self.assertIn("errors: 0", printed)
        self.assertNotIn("max search depth too small", printed)
        self.assertNotIn("out of memory", printed)
        self.assertNotIn("Search not completed", printed)
        states = re.search(r"(\d\S*) states, stored", printed)
        self.assertIsNotNone(states, printed)
        print(f"{settings}: {states[1]} states")

    @parameterized.parameters(*MUTATIONS)
    def test_a_broken_protocol_fails(self, name, mutation, error, settings):
        number = mutations(name).index(mutation)
        printed = self.check(name, settings | {"BROKEN": "broken"}, "-O0", number)
        self.assertRegex(printed, rf"(?m)^pan:1: {error}")
        self.assertIn("errors: 1", printed)

    @parameterized.parameters(*MODELS)
    def test_every_mutation_is_tried(self, name):
        tried = dict.fromkeys(mutation for mutation, *_ in MODELS[name].mutations)
        self.assertEqual(mutations(name), ["NOTHING", *tried])

    @parameterized.parameters(*MODELS)
    def test_the_code_carries_the_labels_of_the_model(self, name):
        def labels(text: str) -> set[str]:
            return set(re.findall(rf"\b{MODELS[name].label}\b", text))

        sources = "".join(path.read_text() for path in SOURCES.rglob("*.[ch]*"))
        self.assertNotEmpty(labels(text(name)))
        self.assertEqual(labels(sources), labels(text(name)))


if __name__ == "__main__":
    absltest.main()
