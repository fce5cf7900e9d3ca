"""The doctor: what it reports on this machine, and what it makes of other machines' facts."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import ctypes.util
import io
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest.mock

import testing  # isort: skip  # noqa: F401  sets the devices

import jax
import numpy as np
import tier
from absl.testing import absltest, parameterized

from jax_ep import _ffi
from jax_ep._src.core import network, runtime
from jax_ep.doctor import __main__ as doctor
from jax_ep.doctor import layer, probes

DONE = {"stage": "done", "largest_error": 1e-7, "probes": [], "libraries": {}}
ON_CPU = DONE | {"platform": "cpu", "implementation": "xla", "reason": "the platform is cpu"}
ON_GPU = DONE | {"platform": "gpu", "implementation": "cuda", "reason": "the platform is CUDA"}
FAILED = {
    "timed_out": False,
    "ended": "it ended with status 1",
    "stderr": "Traceback\nXlaRuntimeError: no kernels\n",
}
CRASHED = ON_GPU | FAILED | {"stage": "run"}
HUNG = CRASHED | {"timed_out": True}

CPU_MACHINE = {
    "versions": {"jax": "0.11.2", "jax-cuda13-plugin": None},
    "build": {"cuda": True, "cuda_version": "13.0"},
    "driver_problem": "no NVIDIA driver can be loaded; this build of jax_ep needs one",
    "environment": {},
    "container": {
        "device_files": [],
        "missing_device_files": ["nvidiactl", "nvidia-uvm"],
        "shm_bytes": 2**30,
        "locked_memory_bytes": None,
        "driver_module": False,
    },
    "driver": None,
    "gpus": [],
    "peers": [],
    "trial": ON_CPU,
}
GPU_MACHINE = CPU_MACHINE | {
    "driver_problem": "",
    "container": CPU_MACHINE["container"]
    | {"device_files": ["nvidia0", "nvidia1", "nvidia-uvm", "nvidiactl"], "missing_device_files": [], "driver_module": True},
    "driver": "580.1",
    "gpus": [{"name": "H200", "mig": False, "nvlinks": 18}] * 2,
    "peers": [["self", "NVLink"], ["NVLink", "self"]],
    "trial": ON_GPU,
}  # fmt: skip


def changed(facts, **changes):
    """`facts` with other values; dicts are merged."""
    facts = copy.deepcopy(facts)
    for name, value in changes.items():
        merge = isinstance(value, dict) and name != "trial"
        facts[name] = facts[name] | value if merge else value
    return facts


# Cause -> (facts, what the summary says, what the advice says)
CAUSES = {
    "wheel_without_cuda": (changed(GPU_MACHINE, build={"cuda": False}, trial=ON_GPU | {"implementation": "xla"}), "no CUDA kernels", "jax-ep.cuda13"),
    "no_device_files": (
        changed(CPU_MACHINE, environment={"NVIDIA_VISIBLE_DEVICES": "all"}),
        "/dev/nvidia0, /dev/nvidiactl, /dev/nvidia-uvm are missing", "--gpus all",
    ),
    "no_device_files: of the host's driver": (changed(CPU_MACHINE, container={"driver_module": True}), "/dev/nvidia0", "--gpus all"),
    "no_device_files: one": (
        changed(GPU_MACHINE, container={"missing_device_files": ["nvidia-uvm"]}, trial=CRASHED),
        "files /dev/nvidia-uvm are missing", "--device",
    ),
    "old_driver": (
        changed(GPU_MACHINE, driver_problem="the NVIDIA driver supports CUDA 12.4; this build needs 13.0", trial=CRASHED),
        "CUDA 12.4.*driver 580.1", "Update the NVIDIA driver",
    ),
    "jax_without_cuda": (changed(GPU_MACHINE, trial=ON_CPU), "JAX runs on cpu$", "cuda13"),
    "jax_without_cuda: chosen": (
        changed(GPU_MACHINE, environment={"JAX_PLATFORMS": "cpu"}, trial=ON_CPU), "JAX_PLATFORMS=cpu", "Unset",
    ),
    "jax_without_cuda: its plugin does not start": (
        changed(GPU_MACHINE, versions={"jax-cuda13-plugin": "0.11.2"}, trial=ON_CPU),
        "though jax-cuda13-plugin is installed", "See why",
    ),
    "no_code_for_the_gpu": (
        changed(GPU_MACHINE, trial=CRASHED | {"probes": [{"ordinal": 1, "name": "V100", "error": "no code for 7.0"}]}),
        "GPU 1 .V100. runs no kernel: no code for 7.0", "CMAKE_CUDA_ARCHITECTURES",
    ),
    "chosen_otherwise": (
        changed(GPU_MACHINE, trial=ON_GPU | {"implementation": "xla", "reason": "JAX_EP_IMPLEMENTATION=xla"}),
        "pure-JAX implementation: JAX_EP_IMPLEMENTATION=xla", "Unset",
    ),
    "in_mig_mode": (
        changed(GPU_MACHINE, gpus=[{"name": "H200", "mig": True, "nvlinks": 0}], peers=[], trial=CRASHED),
        "GPU 0 .H200. is in MIG mode", "nvidia-smi -mig 0",
    ),
    "no_peer_access": (
        changed(GPU_MACHINE, peers=[["self", "disabled by the driver's settings"], ["yes", "self"]], trial=HUNG),
        "GPUs 0 and 1 cannot access .* disabled", "topo -p2p",
    ),
    "container_limits: shared memory": (changed(GPU_MACHINE, container={"shm_bytes": 64 * 2**20}, trial=CRASHED), "64 MiB", "--shm-size"),
    "container_limits: locked memory": (changed(GPU_MACHINE, container={"locked_memory_bytes": 65536}, trial=HUNG), "64 KiB", "memlock"),
}  # fmt: skip


class VerdictTest(parameterized.TestCase):
    @parameterized.parameters(*CAUSES)
    def test_causes(self, name):
        facts, summary, advice = CAUSES[name]
        verdict = doctor.judge(facts)
        self.assertEqual(verdict.exit_status, 1)
        self.assertRegex(verdict.summary, summary)
        self.assertRegex(verdict.advice, advice)
        function = getattr(doctor, name.split(":")[0])
        self.assertEqual(function(facts), verdict)
        self.assertIsNone(function(GPU_MACHINE))
        self.assertIsNone(function(CPU_MACHINE))
        self.assertIn(verdict.summary, doctor.report(facts, verdict))

    def test_every_cause_is_tried(self):
        tried = {name.split(":")[0] for name in CAUSES}
        self.assertEqual(tried, {function.__name__ for function in doctor.CAUSES})

    @parameterized.parameters(
        (GPU_MACHINE, 0, "CUDA path is verified"),
        (CPU_MACHINE, 2, "no GPU"),
        (changed(CPU_MACHINE, build={"cuda": False}), 2, "no GPU"),
        (changed(CPU_MACHINE, trial=ON_CPU | {"largest_error": 0.1}), 1, "wrong by 0.1"),
        (changed(GPU_MACHINE, trial=ON_GPU | {"largest_error": None}), 1, "is NaN"),
        (changed(GPU_MACHINE, trial=CRASHED), 1, "fails .*'run'.*status 1.*no kernels"),
        (changed(GPU_MACHINE, trial=HUNG), 1, "does not end .*'run'"),
        # a possible cause of a failure is no failure
        (changed(GPU_MACHINE, container={"shm_bytes": 0}, gpus=[{"mig": True}]), 0, "verified"),
    )
    def test_without_a_cause(self, facts, exit_status, text):
        verdict = doctor.judge(facts)
        self.assertEqual(verdict.exit_status, exit_status)
        self.assertRegex(verdict.summary, text)

    def test_a_failing_cuda_layer_names_the_way_round(self):
        verdict = doctor.judge(changed(GPU_MACHINE, trial=CRASHED))
        self.assertIn("JAX_EP_IMPLEMENTATION=xla", verdict.advice)


class FakeNvml:
    """libnvidia-ml with two GPUs: the first in MIG mode, the second without the call for it."""

    def __init__(self):
        self.handles = {}

    def nvmlInit_v2(self):
        return 0

    def nvmlSystemGetDriverVersion(self, buffer, size):
        buffer.value = b"580.159"
        return 0

    def nvmlDeviceGetCount_v2(self, count):
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):
        handle._obj.value = 100 + index.value
        return 0

    def nvmlDeviceGetName(self, handle, buffer, size):
        buffer.value = b"GPU of handle %d" % handle.value
        return 0

    def nvmlDeviceGetUUID(self, handle, buffer, size):
        buffer.value = b"GPU-%d" % handle.value
        return 0

    def nvmlDeviceGetMigMode(self, handle, current, pending):
        current._obj.value = 1
        return 0 if handle.value == 100 else 3

    def nvmlDeviceGetNvLinkState(self, handle, link, active):
        active._obj.value = 1
        return 0 if link.value < 4 else 2

    def nvmlDeviceGetP2PStatus(self, a, b, capability, status):
        nvlink = capability.value == probes.P2P_NVLINK
        status._obj.value = 5 if nvlink and a.value == 100 else 0 if a.value == 101 else 4
        return 0


class ProbesTest(absltest.TestCase):
    def test_nvml(self):
        found = probes.nvml(FakeNvml())
        self.assertEqual(found["driver"], "580.159")
        names = [f"GPU of handle {100 + index}" for index in range(2)]
        self.assertEqual([gpu["name"] for gpu in found["gpus"]], names)
        self.assertEqual([gpu["mig"] for gpu in found["gpus"]], [True, False])
        self.assertEqual([gpu["nvlinks"] for gpu in found["gpus"]], [4, 4])
        self.assertEqual([gpu["uuid"] for gpu in found["gpus"]], ["GPU-100", "GPU-101"])
        expected = [["self", "disabled by the driver's settings"], ["NVLink", "self"]]
        self.assertEqual(found["peers"], expected)

    def test_nvml_that_refuses(self):
        refusing = unittest.mock.Mock()
        refusing.nvmlInit_v2.return_value = 9
        found = probes.nvml(refusing)
        self.assertEqual((found["gpus"], found["peers"]), ([], []))
        self.assertIn("nvmlInit_v2 answered 9", found["nvml_problem"])

    def test_a_driver_without_nvml(self):
        with unittest.mock.patch.object(ctypes, "CDLL", side_effect=OSError("not found")):
            self.assertEqual(probes.nvml()["nvml_problem"], "not found")

    def test_container(self):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for name in ("dev/shm/x", "dev/nvidia0", "dev/nvidiactl", "proc/driver/nvidia/version"):
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).touch()
            found = probes.container(root)
        self.assertEqual(found["device_files"], ["nvidia0", "nvidiactl"])
        self.assertEqual(found["missing_device_files"], ["nvidia-uvm"])
        self.assertTrue(found["driver_module"])
        self.assertGreater(found["shm_bytes"], 0)

    def test_linked_libraries(self):
        maps = "7f00 r-xp 00 /usr/lib/libcuda.so.580.1\n7f01 rw-p 0 /a/b/libnccl.so.2\n7f02 /a/libc.so.6\n"
        expected = {
            "libcuda.so.580.1": "/usr/lib/libcuda.so.580.1",
            "libnccl.so.2": "/a/b/libnccl.so.2",
        }
        self.assertEqual(probes.linked_libraries(maps), expected)


class NetworkTest(parameterized.TestCase):
    @parameterized.parameters(
        ("", "JAX_EP_NETWORK is not set"),
        ("none", "JAX_EP_NETWORK is 'none'"),
        (
            "ib",
            "JAX_EP_NETWORK is 'ib'; expected 'ucx', 'nvshmem', 'auto', 'none', or that it is not set",
        ),
    )
    def test_a_setting_that_joins_nothing(self, name, problem):
        with unittest.mock.patch.dict("os.environ", JAX_EP_NETWORK=name):
            self.assertEqual(network.join_domains(), problem)
            self.assertEqual(network.is_chosen(), name == "ib")
            with unittest.mock.patch.object(runtime, "NETWORK_PROBLEM", problem):
                found = probes.network()
        self.assertEqual(found["setting"], name or "unset")
        self.assertEqual((found["joins_hosts"], found["problem"]), (False, problem))
        self.assertIn(
            problem, doctor.report({"network": found, "peers": []}, doctor.Verdict(0, ""))
        )

    @parameterized.parameters(
        ("/a/libucx/lib", None, "libucx-cu13 1.22.0", "/a/libucx/lib"),
        ("", "libucp.so.0", "libucp.so.0", "system"),
        ("", None, "not found", None),
    )
    def test_ucx(self, folder, system, ucx, location):
        versions = {"libucx-cu13": "1.22.0"} if folder else {}
        with (
            unittest.mock.patch.object(network, "find_ucx", lambda: folder),
            unittest.mock.patch.object(ctypes.util, "find_library", lambda name: system),
            unittest.mock.patch.object(probes, "version", versions.get),
        ):
            found = probes.network()
        self.assertEqual((found["ucx"], found["ucx_location"]), (ucx, location))

    @parameterized.parameters(
        ("/a/nvshmem/lib", None, "nvidia-nvshmem-cu13 3.8.0", "/a/nvshmem/lib"),
        ("", "libnvshmem_host.so.3", "libnvshmem_host.so.3", "system"),
        ("", None, "not found", None),
    )
    def test_nvshmem(self, folder, system, nvshmem, location):
        versions = {"nvidia-nvshmem-cu13": "3.8.0"} if folder else {}
        with (
            unittest.mock.patch.object(network, "find_nvshmem", lambda: folder),
            unittest.mock.patch.object(ctypes.util, "find_library", lambda name: system),
            unittest.mock.patch.object(probes, "version", versions.get),
        ):
            found = probes.network()
        self.assertEqual((found["nvshmem"], found["nvshmem_location"]), (nvshmem, location))

    @parameterized.parameters("ucx", "nvshmem")
    def test_a_network_that_cannot_be_used(self, name):
        with (
            unittest.mock.patch.dict("os.environ", JAX_EP_NETWORK=name),
            unittest.mock.patch.object(_ffi, f"use_{name}", lambda folder: "no luck"),
        ):
            self.assertEqual(network.join_domains(), f"JAX_EP_NETWORK is '{name}', and no luck")

    @parameterized.parameters(
        ("", "", ["ucx"], None),
        ("no luck", "", ["ucx", "nvshmem"], None),
        (
            "no luck",
            "no chance",
            ["ucx", "nvshmem"],
            "JAX_EP_NETWORK is 'auto', and no luck; no chance",
        ),
    )
    def test_the_first_that_can_be_used(self, ucx, nvshmem, tried, problem):
        asked = []
        found = {"ucx": ucx, "nvshmem": nvshmem}
        use = {
            f"use_{name}": lambda folder, name=name: asked.append(name) or found[name]
            for name in network.NAMES
        }
        with (
            unittest.mock.patch.dict("os.environ", JAX_EP_NETWORK="auto"),
            unittest.mock.patch.multiple(_ffi, **use),
        ):
            self.assertEqual(network.join_domains(), problem)
            # Without one, calls inside a host need none.
            self.assertFalse(network.is_chosen())
        self.assertEqual(asked, tried)

    def test_nvshmem_is_not_loaded_unless_it_is_chosen(self):
        code = "import jax_ep; assert 'libnvshmem' not in open('/proc/self/maps').read()"
        environment = {k: v for k, v in os.environ.items() if k != "JAX_EP_NETWORK"}
        subprocess.run([sys.executable, "-P", "-c", code], check=True, env=environment)

    @parameterized.parameters(("1", True), ("8", False))
    def test_one_queue_is_refused(self, queues, is_refused):
        with (
            unittest.mock.patch.dict("os.environ", CUDA_DEVICE_MAX_CONNECTIONS=queues),
            unittest.mock.patch.object(runtime, "NETWORK_PROBLEM", None),
        ):
            found = probes.network()
        self.assertEqual("refused" in found, is_refused)
        self.assertTrue(found["joins_hosts"])


class TrialTest(parameterized.TestCase):
    def run_code(self, code: str, **options):
        return layer.run((sys.executable, "-c", code), **options)

    def test_a_crash(self):
        code = 'print(\'{"stage": "run"}\', flush=True); import os; os.abort()'
        found = self.run_code(code)
        self.assertEqual((found["stage"], found["timed_out"]), ("run", False))
        self.assertIn("SIGABRT", found["ended"])

    def test_an_exception(self):
        found = self.run_code("raise RuntimeError('no luck')")
        self.assertEqual((found["stage"], found["ended"]), ("start", "it ended with status 1"))
        self.assertIn("no luck", found["stderr"])

    @parameterized.parameters(True, False)
    def test_a_hang(self, notices_itself):
        code = "import faulthandler, time\n"
        code += "faulthandler.dump_traceback_later(0.1, exit=True)\n" if notices_itself else ""
        found = self.run_code(
            code + "time.sleep(60)", deadline=1, start=0 if not notices_itself else 30
        )
        self.assertTrue(found["timed_out"], found)

    def test_a_wrong_layer(self):
        trial = layer.Layer()
        self.assertLess(trial.largest_error(), 1e-5)
        for change, expected in ((lambda y: y + 1, 0.05), (lambda y: y * np.nan, None)):
            trial = layer.Layer()
            right = trial.compiled
            trial.compiled = lambda *a, right=right, change=change: change(np.asarray(right(*a)))
            error = trial.largest_error()
            self.assertTrue(error is expected or error > expected, error)

    def test_on_this_machine(self):
        facts = doctor.collect()
        self.assertEqual(facts["trial"]["stage"], "done", str(facts))
        self.assertLess(facts["trial"]["largest_error"], 1e-5)
        self.assertNotEmpty(facts["trial"]["devices"])
        verdict = doctor.judge(facts)
        expected = {"cpu": 2, "gpu": 0}[jax.default_backend()]
        self.assertEqual(verdict.exit_status, expected, doctor.report(facts, verdict))
        for output in ([], ["--json"]):
            printed = io.StringIO()
            with (
                unittest.mock.patch("sys.argv", ["doctor", *output]),
                unittest.mock.patch.object(doctor, "collect", lambda: facts),
                contextlib.redirect_stdout(printed),
            ):
                self.assertEqual(doctor.main(), expected)
            self.assertIn("jaxlib", printed.getvalue())
        self.assertEqual(json.loads(printed.getvalue())["verdict"]["exit_status"], expected)
        if tier.ON_GPU and not tier.is_rehearsal():
            self.assertLen(facts["trial"]["probes"], tier.NUM_GPUS)


if __name__ == "__main__":
    absltest.main()
