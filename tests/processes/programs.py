"""Programs that several processes run together, by the name that a test gives:

    python tests/processes/programs.py NAME FOLDER

The launcher starts it in each process. On CPU devices run those that wait for no failure of a kernel.
"""

from __future__ import annotations

import os
import pathlib
import sys
import time
import unittest.mock

import launcher  # isort: skip

import testing  # isort: skip

import jax
import numpy as np
import numpy_moe
from jax.experimental import multihost_utils
from jax.extend import backend
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from testing import Sizes

import jax_ep

SIZES = {"num_tokens": 16, "num_experts": 8, "hidden": 8}


# ---- meshes, arrays, and a layer


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


# ---- random routes, and a layer of experts


def check_ranks(
    got: jax.Array, expected: np.ndarray, message: str, same=testing.assert_bitwise
) -> None:
    """This process's shards are those of `expected`, [R, n, ...]."""
    for shard in got.addressable_shards:
        rank = (shard.index[0].start or 0) // expected.shape[1]
        same(shard.data, expected[rank], f"{message} of rank {rank}")


def routes(sizes: Sizes, seed: int) -> None:
    """dispatch, redispatch and combine of every kind of routes, bit for bit. Small integers make sums exact."""
    mesh, spec = meshes()["expert"][0], P("expert")

    def f(ids, x, other, weights):
        sent = sizes.dispatch(x, ids, weights)
        again = jax_ep.redispatch(other, sent.plan, weights)
        out = jax_ep.combine(again.rows, sent.plan, sent.row_weights)
        return (
            sent.rows,
            sent.row_weights,
            again.rows,
            out,
            jax_ep.combine(sent.rows, sent.plan, None),
        )

    run = testing.sharded(f, mesh)
    rng = np.random.default_rng(seed)
    integers = lambda *shape: rng.integers(-8, 9, shape).astype(np.float32)
    for name, ids in testing.routings(sizes, seed).items():
        x, other = (integers(*ids.shape[:2], sizes.hidden) for _ in range(2))
        weights = integers(*ids.shape)
        arguments = testing.merge_ranks((ids, x, other, weights))
        got = run(*(place(a, mesh, spec) for a in arguments))
        plans = sizes.plans(ids)
        rows, row_weights = numpy_moe.dispatch(x, weights, plans)
        other_rows, _ = numpy_moe.dispatch(other, weights, plans)
        kept = np.stack([plan.kept for plan in plans]).astype(np.float32)
        received = {"rows": rows, "row_weights": row_weights, "redispatched": other_rows}
        for (part, expected), values in zip(received.items(), got, strict=False):
            check_ranks(values, expected, f"{name} {part}")
        sums = (weights * kept).sum(-1, keepdims=True) * other, kept.sum(-1, keepdims=True) * x
        for values, expected in zip(got[3:], sums, strict=True):  # zeros may have either sign
            check_ranks(values, expected, f"{name} combine", np.testing.assert_array_equal)
        jax_ep.check()


def mlp(**options) -> None:
    """moe_mlp and its gradients agree with those of one device that has all experts."""
    count, hidden, intermediate, top_k = jax.device_count(), 16, 8, 2
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    ids = testing.distinct_ids(rng, Sizes(1, 2 * count, 8 * count, top_k))[0]
    floats = (
        normal(8 * count, hidden),
        rng.random((8 * count, top_k)).astype(np.float32),
        normal(2 * count, hidden, 2, intermediate) / 2,
        normal(2 * count, intermediate, hidden) / 2,
    )

    def results(mesh, **options):
        def f(ids, *floats):
            return jax_ep.moe_mlp(floats[0], ids, *floats[1:], axis_name="expert", **options)[0]

        placed = [place(a, mesh, P("expert")) for a in (ids, *floats)]
        return testing.value_and_gradients(testing.sharded(f, mesh), *placed)

    alone = testing.mesh_of((1,), ("expert",), devices=jax.local_devices()[:1])
    names = ("out", "x", "topk_weights", "w_up", "w_down")
    expected = (np.asarray(a) for a in results(alone, implementation="xla"))
    got = results(meshes()["expert"][0], **options)
    check_local(*(dict(zip(names, values, strict=True)) for values in (got, expected)))


def run_calls(_: str) -> None:
    """Random routes, moe_mlp with its gradients, workspaces that grow, and releases."""
    count = jax.device_count()
    for i, sizes in enumerate(
        (
            Sizes(count, num_tokens=6, top_k=3),
            Sizes(count, num_local=3, num_tokens=33, top_k=2, row_align=4, recv_capacity=64),
            Sizes(count, num_tokens=300, top_k=4, hidden=32),
        )
    ):
        routes(sizes, seed=i)
    print("released", jax_ep.release())
    mlp()
    mlp(num_chunks=2, capacity_factor=4.0)
    jax_ep.release()
    routes(Sizes(count, num_tokens=6, top_k=3), seed=9)


# ---- failures, the end of a process, and a new beginning


class OneLayer:
    """A dispatch and a combine, compiled, whose results are known."""

    def __init__(self) -> None:
        self.mesh = meshes()["expert"][0]
        sizes = Sizes(jax.device_count(), num_tokens=16, top_k=4)
        ids = testing.merge_ranks(testing.routings(sizes)["half"])
        x = np.ones((len(ids), sizes.hidden), np.float32)
        self.expected = np.repeat((ids >= 0).sum(1, keepdims=True), sizes.hidden, 1).astype(
            np.float32
        )
        self.arguments = [place(a, self.mesh, P("expert")) for a in (x, ids)]

        def f(x, ids):
            sent = sizes.dispatch(x, ids, None)
            return jax_ep.combine(sent.rows, sent.plan, None)

        self.run = testing.sharded(f, self.mesh)

    def __call__(self) -> jax.Array:
        return jax.block_until_ready(self.run(*self.arguments))

    def check(self, times: int = 3) -> None:
        for _ in range(times):
            check_ranks(
                self(), self.expected.reshape(jax.device_count(), -1, self.expected.shape[1]), "out"
            )
            jax_ep.check()


def is_last() -> bool:
    return jax.process_index() == jax.process_count() - 1


def first_error(action, seconds: float = 60) -> str:
    """Repeats `action` until it fails, and returns the message."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            action()
        except (jax.errors.JaxRuntimeError, jax_ep.Error) as error:
            return str(error)
        time.sleep(0.05)
    raise AssertionError(f"no error within {seconds} s")


def run_abort(_: str) -> None:
    """The last process's device never makes a call: all processes report who waited for whom. A release mends it."""
    layer = OneLayer()
    layer.check()
    absent = {"JAX_EP_TEST_ABSENT_DEVICE": "0"} if is_last() else {}
    with unittest.mock.patch.dict(os.environ, absent):
        out = layer()
    if not is_last():
        assert all(np.isnan(shard.data).all() for shard in out.addressable_shards)
    message = first_error(jax_ep.check)
    assert f"waited for rank {jax.device_count() - 1} in dispatch.entry" in message, message
    jax_ep.release()
    layer.check()


def run_exit(_: str) -> None:
    """The last process ends by an exception. The others, which go on, learn that it has exited."""
    layer = OneLayer()
    layer.check()
    if is_last() or jax.default_backend() == "cpu":
        raise RuntimeError("on purpose")
    message = first_error(layer)
    assert "has exited" in message, message


def run_again(folder: str) -> None:
    """jax.distributed ends and begins again in the same processes."""
    OneLayer().check()
    jax_ep.release()
    jax.distributed.shutdown()
    backend.clear_backends()
    testing.expert_mesh.cache_clear()
    jax.distributed.initialize(
        second_coordinator(pathlib.Path(folder)),
        int(os.environ[launcher.PROCESSES]),
        int(os.environ[launcher.PROCESS]),
        local_device_ids=launcher.local_device_ids(),
    )
    layer = OneLayer()
    layer.check()
    routes(Sizes(jax.device_count(), num_tokens=40), seed=3)


def second_coordinator(folder: pathlib.Path) -> str:
    """The address that process 0 has chosen."""
    path = folder / "coordinator"
    if os.environ[launcher.PROCESS] == "0":
        (folder / "new").write_text(f"127.0.0.1:{launcher.free_port()}")
        (folder / "new").rename(path)
    while not path.exists():
        time.sleep(0.05)
    return path.read_text()


def run_briefly(folder: str) -> None:
    """Everything that needs no kernels, with the fewest programs to compile."""
    mlp(num_chunks=2, capacity_factor=4.0)
    run_again(folder)
    run_exit(folder)


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2])
