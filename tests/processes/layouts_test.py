"""One program in one process or in several, on CPU devices: the same bits.

    python tests/processes/layouts_test.py --shared-gpu 2 4

runs what concerns the kernels in 2 and in 4 processes that share one GPU. tools/shared_gpu_test.sh does so with the installed
package.
"""

from __future__ import annotations

import functools
import os
import pathlib
import sys
import tempfile
import time

import launcher  # isort: skip

import testing  # isort: skip

import jax
import numpy as np
from absl.testing import absltest, parameterized
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep.doctor import processes as doctor

SIZES = {"num_tokens": 16, "num_experts": 8, "hidden": 8}


# Runs the doctor in a process that the launcher has started.
DOCTOR = """
import os, runpy, sys
coordinator = os.environ["JAX_EP_TEST_COORDINATOR"]
process = os.environ["JAX_EP_TEST_PROCESS"]
sys.argv = ["doctor", f"--coordinator={coordinator}", "--processes=2", f"--process={process}"]
runpy.run_module("jax_ep.doctor.processes", run_name="__main__")
"""


# ---- the programs that processes run, by the name that a test gives


def meshes() -> dict[str, tuple[Mesh, str | tuple[str, ...]]]:
    """Meshes of all devices, and the axes over which tokens are split."""
    devices = jax.devices()
    count = len(devices)
    half = count // 2
    return {
        "expert": (testing.mesh_of((count,), ("expert",)), "expert"),
        "reversed": (testing.mesh_of((count,), ("expert",), devices=devices[::-1]), "expert"),
        "data_expert": (testing.mesh_of((half, 2), ("data", "expert")), ("data", "expert")),
        "expert_data": (testing.mesh_of((2, half), ("expert", "data")), ("expert", "data")),
    }


def place(whole: np.ndarray, mesh: Mesh, spec: P) -> jax.Array:
    """Makes an array from what all processes have."""
    sharding = jax.NamedSharding(mesh, spec)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def layer(mesh: Mesh, axes: str | tuple[str, ...], num_tokens: int = SIZES["num_tokens"]):
    """Returns values and gradients of a layer on a mesh, by name, and those of dense experts."""
    sizes = SIZES | {"num_tokens": num_tokens}
    ids, x, weights, matrices = testing.layer_arguments(**sizes)
    specs = (P(axes), P(axes), P(axes), P("expert"))
    f = jax.shard_map(testing.expert_layer, mesh=mesh, in_specs=specs, out_specs=P(axes))
    arguments = zip((ids, x, weights, matrices), specs, strict=True)
    placed = [place(a, mesh, spec) for a, spec in arguments]
    names = ("out", "x", "topk_weights", "matrices")
    got = dict(zip(names, testing.value_and_gradients(f, *placed), strict=True))
    dense = testing.value_and_gradients(testing.dense_layer, ids, x, weights, matrices)
    return got, dict(zip(names, map(np.asarray, dense), strict=True))


def save_layers(folder: str) -> None:
    arrays = {}
    for name, (mesh, axes) in meshes().items():
        got, dense = layer(mesh, axes)
        for key, value in got.items():
            whole = multihost_utils.process_allgather(value, tiled=True)
            testing.assert_close(whole, dense[key], f"{name} {key}", steps=128)
            arrays[f"{name}_{key}"] = whole
    if jax.process_index() == 0:
        np.savez(pathlib.Path(folder) / "results.npz", **arrays)


def check_local(got: dict[str, jax.Array], expected: dict[str, np.ndarray]) -> None:
    for key, value in got.items():
        for shard in value.addressable_shards:
            testing.assert_close(shard.data, expected[key][shard.index], key, steps=128)
    jax_ep.check()


def run_layers(_: str) -> None:
    """Several meshes, workspaces that grow, and a release."""
    for num_tokens in (16, 256):
        for mesh, axes in meshes().values():
            check_local(*layer(mesh, axes, num_tokens))
    print("released", jax_ep.release())
    mesh, axes = meshes()["expert"]
    check_local(*layer(mesh, axes))


def run_other_shapes(_: str) -> None:
    """The last process runs another shape than the others: all of them say so."""
    mesh, axes = meshes()["expert"]
    check_local(*layer(mesh, axes))
    is_last = jax.process_index() == jax.process_count() - 1

    def dispatch(x, ids):
        sent = jax_ep.dispatch(x, ids, None, num_experts=SIZES["num_experts"], axis_name="expert")
        return sent.rows

    num_tokens = jax.device_count() * (2 if is_last else 1)
    x = place(np.ones((num_tokens, 8), np.float32), mesh, P("expert"))
    ids = place(np.zeros((num_tokens, 1), np.int32), mesh, P("expert"))
    f = jax.jit(jax.shard_map(dispatch, mesh=mesh, in_specs=P("expert"), out_specs=P("expert")))
    try:
        f(x, ids).block_until_ready()
    except jax.errors.JaxRuntimeError as error:
        assert "while rank" in str(error) and "in process" in str(error), error
        print("as expected:", error)
    else:
        raise AssertionError("no error")
    jax_ep.release()
    check_local(*layer(mesh, axes))


def run_until_killed(folder: str) -> None:
    """Calls for ever. The error of the process that is left names the one that has died."""
    mesh, _ = meshes()["expert"]
    ids, x, weights, matrices = testing.layer_arguments(**SIZES)
    f = jax.jit(
        jax.shard_map(testing.expert_layer, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))
    )
    placed = [place(a, mesh, P("expert")) for a in (ids, x, weights, matrices)]
    try:
        for i in range(10**6):
            f(*placed).block_until_ready()
            jax_ep.check()
            if i == 3:
                (pathlib.Path(folder) / f"ready{jax.process_index()}").touch()
    except (jax.errors.JaxRuntimeError, jax_ep.Error) as error:
        assert "has died" in str(error), error
        print("as expected:", error, flush=True)
        os._exit(0)  # jax.distributed would wait for the dead process


CHILDREN = {f.__name__: f for f in (save_layers, run_layers, run_other_shapes, run_until_killed)}


def start(name: str, folder: str, **options) -> list[launcher.Result]:
    return launcher.run_well([__file__, "--child", name, folder], **options)


# ---- CPU devices


class LayoutsTest(parameterized.TestCase):
    @staticmethod
    @functools.cache
    def results(processes: int, devices: int) -> dict[str, np.ndarray]:
        with tempfile.TemporaryDirectory() as folder:
            environment = {"JAX_EP_TEST_DEVICES": str(devices), "JAX_PLATFORMS": "cpu"}
            start("save_layers", folder, processes=processes, environment=environment)
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
        with self.assertRaisesRegex(AssertionError, r"processes \[0, 1\] run after 0.5 s"):
            launcher.run(["-c", program], processes=2, timeout=0.5)
        self.assertLess(time.monotonic() - begin, 30)


# ---- one GPU that several processes share


def run_on_shared_gpu(processes: int) -> None:
    for name in ("run_layers", "run_other_shapes"):
        begin = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            start(name, folder, processes=processes, environment=launcher.SHARED_GPU, timeout=240)
        print(f"{processes} x 1 {name}: {time.monotonic() - begin:.1f} s", flush=True)
    begin = time.monotonic()
    kill_one(processes)
    print(f"{processes} x 1 one is killed: {time.monotonic() - begin:.1f} s", flush=True)


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
            [__file__, "--child", "run_until_killed", folder],
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
    if sys.argv[1:2] == ["--child"]:
        CHILDREN[sys.argv[2]](sys.argv[3])
    elif sys.argv[1:2] == ["--shared-gpu"]:
        for count in sys.argv[2:]:
            run_on_shared_gpu(int(count))
    else:
        absltest.main()
