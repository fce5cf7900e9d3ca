"""One program in one process or in several, on CPU devices: the same bits. The doctor and the launcher of tests."""

from __future__ import annotations

import functools
import pathlib
import tempfile
import time

import launcher  # isort: skip

import testing  # isort: skip

import numpy as np
from absl.testing import absltest, parameterized

from jax_ep.doctor import processes as doctor

PROGRAMS = str(pathlib.Path(__file__).with_name("programs.py"))


# Runs the doctor in a process that the launcher has started.
DOCTOR = """
import os, runpy, sys
coordinator = os.environ["JAX_EP_TEST_COORDINATOR"]
process = os.environ["JAX_EP_TEST_PROCESS"]
sys.argv = ["doctor", f"--coordinator={coordinator}", "--processes=2", f"--process={process}"]
runpy.run_module("jax_ep.doctor.processes", run_name="__main__")
"""


# ---- CPU devices


class LayoutsTest(parameterized.TestCase):
    @staticmethod
    @functools.cache
    def results(processes: int, devices: int) -> dict[str, np.ndarray]:
        with tempfile.TemporaryDirectory() as folder:
            environment = {"JAX_EP_TEST_DEVICES": str(devices), "JAX_PLATFORMS": "cpu"}
            command = [PROGRAMS, "save_layers", folder]
            launcher.run_well(command, processes=processes, environment=environment)
            with np.load(f"{folder}/results.npz") as saved:
                return dict(saved)

    @parameterized.parameters((2, 2), (4, 1))
    def test_the_same_bits(self, processes: int, devices: int):
        expected, got = self.results(1, 4), self.results(processes, devices)
        self.assertLen(got, 16)
        for name, value in expected.items():
            testing.assert_bitwise(got[name], value, name)


class DoctorTest(absltest.TestCase):
    def test_two_processes(self):
        results = launcher.run_well(
            ["-P", "-c", DOCTOR],
            processes=2,
            environment={"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"},
        )
        self.assertRegex(results[0].output, r"process 0, host .*\nprocess 1, host ")
        self.assertRegex(results[0].output, r"gpus \[.*\], visible all, mps no")
        self.assertIn(
            "a layer over all devices (xla: the platform is cpu): error", results[0].output
        )
        self.assertNotIn("a layer", results[1].output)

    def test_what_keeps_processes_apart(self):
        def process(index: int, **changed: object) -> doctor.Facts:
            one = {"process": index, "host": "a", "boot_id": "b", "network": "net:[1]", "user": 0}
            return one | {"version": "1", "visible": "all"} | changed

        self.assertEmpty(doctor.problems([process(0), process(1)], "gpu"))
        for changed, part in (
            ({"version": "2"}, "1 in process 0"),
            ({"network": "net:[2]"}, "network namespaces"),
            ({"user": 7}, "7 in process 1"),
        ):
            found = doctor.problems([process(0), process(1, **changed)], "gpu")
            self.assertLen(found, 1)
            self.assertIn(part, found[0])
        self.assertEmpty(doctor.problems([process(0), process(1, visible="1")], "gpu"))
        elsewhere = process(1, boot_id="c", network="net:[2]", visible="0")
        self.assertEmpty(doctor.problems([process(0), elsewhere], "gpu"))
        self.assertEmpty(doctor.problems([process(0), process(1, user=7)], "cpu"))


class LauncherTest(absltest.TestCase):
    def test_output_of_every_process_is_in_the_error(self):
        program = "import os, sys; print('I am', os.environ['JAX_EP_TEST_PROCESS']); sys.exit(3)"
        with self.assertRaisesRegex(AssertionError, r"(?s)I am 0.*status 3\nI am 1"):
            launcher.run_well(["-c", program], processes=2)

    def test_processes_that_hang_are_killed(self):
        program = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(100)"
        begin = time.monotonic()
        with self.assertRaisesRegex(AssertionError, r"processes \[0, 1\] have not ended in time"):
            launcher.run(["-c", program], processes=2, timeout=0.5)
        self.assertLess(time.monotonic() - begin, 30)


if __name__ == "__main__":
    absltest.main()
