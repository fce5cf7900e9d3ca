"""Programs over two hosts, which are namespaces of this machine: to JAX they are two slices, as GPU hosts are."""

from __future__ import annotations

import concurrent.futures
import csv
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import unittest
import unittest.mock

import numpy as np
import two_hosts
from absl.testing import absltest

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
LAUNCH, TRAIN = str(EXAMPLES / "launch.py"), str(EXAMPLES / "train_moe_lm.py")
TINY = [
    *("--check-dense-steps=0", "--sample-bytes=0", "--steps=6", "--batch-size=8", "--length=32"),
    *("--width=16", "--num-layers=1", "--num-heads=2", "--intermediate-size=8", "--num-experts=6"),
]
# An address of the first host, and a port that is free there: a host is new.
COORDINATOR = f"--coordinator={two_hosts.ADDRESSES['hosta']}:9876"
TIMEOUT_SECONDS = 300

# Programs on both hosts, one of which SIGTERM does not end.
DEAF = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(1000)"
HANGS = f"""
import os, subprocess, sys, time
import two_hosts

with two_hosts.start() as hosts:
    started = [subprocess.Popen(host.command(sys.executable, "-c", {DEAF!r})) for host in hosts]
    print(*(os.stat(f"/proc/{{host.first.pid}}/ns/net").st_ino for host in hosts), flush=True)
    time.sleep(1000)
"""


def run(host: two_hosts.Host | None, command: list[str]) -> str:
    """Runs Python on a host, or on this machine, and returns its output and status."""
    command = [sys.executable, *command]
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    result = subprocess.run(
        host.command(*command) if host else command,
        env=environment | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    return f"{result.stdout}\nstatus {result.returncode}"


def run_on_both(*commands: list[str]) -> list[str]:
    """Runs one command on each of two new hosts, which are gone afterwards."""
    with concurrent.futures.ThreadPoolExecutor() as pool, two_hosts.start() as hosts:
        return list(pool.map(run, hosts, commands))


class ProgramsTest(absltest.TestCase):
    def test_training_has_the_losses_of_one_host(self):
        with tempfile.TemporaryDirectory() as folder:
            one, two = pathlib.Path(folder) / "one", pathlib.Path(folder) / "two"
            output = run(None, [TRAIN, *TINY, "--cpu-devices=4", f"--output={one}"])
            train = ["1", TRAIN, *TINY, "--cpu-devices=2", f"--output={two}"]
            outputs = run_on_both(
                *([LAUNCH, COORDINATOR, "--hosts=2", f"--host={i}", *train] for i in range(2))
            )
            for text in (output, outputs[0]):
                self.assertIn("compiled for {'data': 2, 'expert': 2}", text)
            self.assertLen(losses(one), 6, output)
            np.testing.assert_allclose(losses(two), losses(one), rtol=1e-5, err_msg=str(outputs))

    def test_experts_over_hosts_have_the_losses_of_domains_on_one(self):
        """Bit for bit: collectives add in the same order in as many processes of one host."""
        options = (*TINY, "--expert-ranks=4", "--cpu-devices=2")
        with tempfile.TemporaryDirectory() as folder:
            one, two = pathlib.Path(folder) / "one", pathlib.Path(folder) / "two"
            domains = ("--nvlink-domain-size=2", f"--output={one}")
            output = run(None, [LAUNCH, "2", TRAIN, *options, *domains])
            self.assertIn("compiled for {'data': 1, 'expert': 4}", output)
            train = ["1", TRAIN, *options, f"--output={two}"]
            outputs = run_on_both(
                *([LAUNCH, COORDINATOR, "--hosts=2", f"--host={i}", *train] for i in range(2))
            )
            self.assertLen(losses(one), 6, output)
            self.assertEqual(losses(two), losses(one), outputs)

    def test_doctor(self):
        doctor = ["-P", "-m", "jax_ep.doctor.processes", COORDINATOR, "--processes=2", "--gpus=0,1"]
        outputs = run_on_both(*([*doctor, f"--process={i}"] for i in range(2)))
        self.assertRegex(outputs[0], r"process 0, host hosta, .*\nprocess 1, host hostb, ")
        self.assertIn("\n2 hosts: experts over 2 devices inside each\n", outputs[0])
        self.assertIn("a layer over all devices (xla: the platform is cpu): error", outputs[0])
        over_hosts = (
            r"a layer with experts over all hosts \(xla, NVLink domains of 2\): error \S+e-0"
        )
        self.assertRegex(outputs[0], over_hosts)
        for output in outputs:
            self.assertEndsWith(output, "status 0")


class HostsTest(absltest.TestCase):
    def test_they_have_names_and_reach_each_other(self):
        with two_hosts.start() as hosts:
            one, other = hosts
            serve = "import socket; s = socket.create_server(('', 9876)); print(flush=True); print(s.accept()[1][0])"
            server = subprocess.Popen(
                one.command(sys.executable, "-c", serve), stdout=subprocess.PIPE, text=True
            )
            server.stdout.readline()
            call = "import socket; socket.create_connection(('hosta', 9876)); print(socket.gethostname())"
            output = subprocess.check_output(
                other.command(sys.executable, "-c", call), text=True, timeout=TIMEOUT_SECONDS
            )
            said, _ = server.communicate(timeout=TIMEOUT_SECONDS)
        self.assertEqual((output.strip(), said.strip()), ("hostb", other.address))

    def test_a_killed_program_ends_on_its_host(self):
        with two_hosts.start() as (host, _):
            before = programs_in(namespaces([host]))
            command = host.command(sys.executable, "-c", f"print(flush=True); {DEAF}")
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            process.stdout.readline()
            self.assertNotEqual(programs_in(namespaces([host])), before)
            process.kill()
            process.communicate()
            wait_until(lambda: programs_in(namespaces([host])) == before)

    def test_nothing_outlives_an_error(self):
        with self.assertRaisesRegex(RuntimeError, "on purpose"), two_hosts.start() as hosts:
            used = namespaces(hosts)
            started = [subprocess.Popen(h.command(sys.executable, "-c", DEAF)) for h in hosts]
            raise RuntimeError("on purpose")
        for process in started:
            self.assertNotEqual(process.wait(TIMEOUT_SECONDS), 0)
        wait_until(lambda: not programs_in(used))

    def test_nothing_outlives_a_killed_process(self):
        with two_hosts.start():  # or a skip
            pass
        process = subprocess.Popen([sys.executable, "-c", HANGS], stdout=subprocess.PIPE, text=True)
        used = {int(inode) for inode in process.stdout.readline().split()}
        self.assertLen(used, 2)
        self.assertNotEmpty(programs_in(used))
        process.kill()
        process.communicate()
        wait_until(lambda: not programs_in(used))

    def test_a_machine_without_namespaces_skips(self):
        with (
            unittest.mock.patch.object(os, "geteuid", lambda: 1000),
            self.assertRaisesRegex(unittest.SkipTest, "two hosts need root"),
            two_hosts.start(),
        ):
            pass
        refusal = ["sh", "-c", "echo Operation not permitted >&2; exit 1"]
        with (
            unittest.mock.patch.object(two_hosts, "UNSHARE", refusal),
            self.assertRaisesRegex(unittest.SkipTest, "Operation not permitted"),
            two_hosts.start(),
        ):
            pass


def losses(folder: pathlib.Path) -> list[float]:
    with (folder / "losses.csv").open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def namespaces(hosts: list[two_hosts.Host]) -> set[int]:
    """The networks of hosts."""
    return {os.stat(f"/proc/{host.first.pid}/ns/net").st_ino for host in hosts}


def programs_in(networks: set[int]) -> set[int]:
    """The processes of this machine in any of these."""
    found = set()
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            inode = (process / "ns" / "net").stat().st_ino
        except OSError:  # it has ended
            continue
        if inode in networks:
            found.add(int(process.name))
    return found


def wait_until(holds) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not holds():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.05)


if __name__ == "__main__":
    absltest.main()
