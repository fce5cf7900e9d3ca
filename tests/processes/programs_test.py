"""The programs of several processes: on CPU devices, and the whole list on one GPU that they share.

    python tests/processes/programs_test.py --shared-gpu 2 4

runs the list in 2 and in 4 processes. tools/shared_gpu_test.sh does so with the installed package.
"""

from __future__ import annotations

import pathlib
import sys
import tempfile
import time

import launcher  # isort: skip

from absl.testing import absltest

PROGRAMS = str(pathlib.Path(__file__).with_name("programs.py"))
CPU = {"JAX_EP_TEST_DEVICES": "1", "JAX_PLATFORMS": "cpu"}

# The list: programs, and variables of each. A captured graph would not ask who is absent.
NO_GRAPHS = {"XLA_FLAGS": "--xla_gpu_autotune_level=0 --xla_gpu_enable_command_buffer="}
SHARED_GPU: dict[str, dict[str, str]] = {
    "run_layers": {},
    "run_calls": {},
    "run_calls by CUDA IPC": {"JAX_EP_TEST_IPC": "1"},
    "run_other_shapes": {},
    "run_abort": NO_GRAPHS | {"JAX_EP_ENTRY_TIMEOUT_S": "20", "JAX_EP_WARN_AFTER_S": "2"},
    "run_exit": {},
    "run_again": {},
    "run_until_killed": {},
}


def run(name: str, **options) -> list[launcher.Result]:
    with tempfile.TemporaryDirectory() as folder:
        return launcher.run([PROGRAMS, name, folder], **options)


def check(name: str, results: list[launcher.Result]) -> None:
    """The processes of a program have ended as they should."""
    report = launcher.describe(results)
    raised = [result for result in results if "RuntimeError: on purpose" in result.output]
    if name == "run_exit":
        assert results[-1] in raised, report
    for result in results:
        assert result.status == (1 if result in raised else 0), report


class ProgramsTest(absltest.TestCase):
    def test_two_processes_on_cpu_devices(self):
        check("run_exit", run("run_briefly", processes=2, environment=CPU))


# ---- one GPU that several processes share


def run_on_shared_gpu(processes: int) -> bool:
    """Runs the whole list, and returns whether all of it has passed."""
    passed = True
    for name, variables in SHARED_GPU.items():
        begin = time.monotonic()
        try:
            run_one(name.split()[0], processes, launcher.SHARED_GPU | variables)
            end = ""
        except AssertionError as error:
            passed, end = False, f", FAILED\n{error}"
        print(f"{processes} x 1 {name}: {time.monotonic() - begin:.1f} s{end}", flush=True)
    return passed


def run_one(program: str, processes: int, environment: dict[str, str]) -> None:
    if program == "run_until_killed":
        return kill_one(processes)
    check(program, run(program, processes=processes, environment=environment, timeout=240))


def kill_one(processes: int) -> None:
    """Kills the last process. The others end within 20 s, with an error that names it."""
    killed: list[float] = []
    with tempfile.TemporaryDirectory() as folder:

        def kill_when_ready(started) -> None:
            ready = [pathlib.Path(folder) / f"ready{i}" for i in range(processes)]
            if not killed and all(path.exists() for path in ready):
                started[-1].kill()
                killed.append(time.monotonic())

        results = launcher.run(
            [PROGRAMS, "run_until_killed", folder],
            processes=processes,
            environment=launcher.SHARED_GPU,
            timeout=240,
            watch=kill_when_ready,
        )
    report = launcher.describe(results)
    assert killed and time.monotonic() - killed[0] < 20, report
    assert results[-1].status == -9, report
    for result in results[:-1]:
        assert result.status == 0, report
        assert f"process {processes - 1} (pid " in result.output, report


if __name__ == "__main__":
    if sys.argv[1:2] == ["--shared-gpu"]:
        passed = [run_on_shared_gpu(int(count)) for count in sys.argv[2:]]
        sys.exit(0 if all(passed) else 1)
    else:
        absltest.main()
