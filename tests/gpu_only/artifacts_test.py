"""Programs that one process compiles or exports and another runs: artifacts of jax.export, and JAX's compilation cache."""

from __future__ import annotations

import collections
import pathlib
import sys
import tempfile

import testing  # isort: skip

import cuda_programs
import jax
import jax.export
import jax.monitoring
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest
from jax.sharding import PartitionSpec as P

import jax_ep

SEEDS = (0, 1)


def loss_and_gradients(*arguments):
    """Uses every operation."""
    layer = jax.shard_map(
        testing.expert_layer,
        mesh=testing.expert_mesh(),
        in_specs=P("expert"),
        out_specs=P("expert"),
    )
    loss = lambda *arguments: jnp.sum(jnp.sin(layer(*arguments)))
    return jax.value_and_grad(loss, (1, 2, 3))(*arguments)


def save(path: pathlib.Path, f):
    """f's results for some arguments."""
    sharding = jax.NamedSharding(testing.expert_mesh(), P("expert"))
    arrays = {}
    for seed in SEEDS:
        placed = [jax.device_put(a, sharding) for a in testing.layer_arguments(seed=seed)]
        for index, leaf in enumerate(jax.tree.leaves(f(*placed))):
            arrays[f"{seed}_{index}"] = np.asarray(leaf)
    np.savez(path, **arrays)


# ---- what the processes do, by the name that a test gives


def export_and_save(folder: pathlib.Path):
    f = jax.jit(loss_and_gradients)
    platform = {"cpu": "cpu", "gpu": "cuda"}[jax.default_backend()]
    export = jax.export.export(f, platforms=[platform], disabled_checks=jax_ep.export_checks())
    exported = export(*testing.layer_arguments())
    (folder / "artefact").write_bytes(exported.serialize())
    save(folder / "first.npz", f)


def run_artefact(folder: pathlib.Path):
    restored = jax.export.deserialize((folder / "artefact").read_bytes())
    save(folder / "second.npz", jax.jit(restored.call))


def compile_and_save(folder: pathlib.Path):
    save(folder / "first.npz", jax.jit(loss_and_gradients))


def compile_from_cache(folder: pathlib.Path):
    events = collections.Counter()
    jax.monitoring.register_event_listener(lambda name, **_: events.update([name]))
    save(folder / "second.npz", jax.jit(loss_and_gradients))
    hits = events["/jax/compilation_cache/cache_hits"]
    misses = events["/jax/compilation_cache/cache_misses"]
    assert hits > 0 and misses == 0, events


CHILDREN = {
    f.__name__: f for f in (export_and_save, run_artefact, compile_and_save, compile_from_cache)
}


class TwoProcessesTest(absltest.TestCase):
    def run_both(self, first, second, **environment: str):
        """The second process gets the same bits as the first."""
        with tempfile.TemporaryDirectory() as folder:
            cache = {k: v.format(folder=folder) for k, v in environment.items()}
            for child in first, second:
                cuda_programs.run(__file__, "--child", child.__name__, folder, **cache)
            one, other = (np.load(f"{folder}/{name}.npz") for name in ("first", "second"))
            self.assertLen(one.files, 4 * len(SEEDS))
            for name in one.files:
                testing.assert_bitwise(other[name], one[name], name)

    def test_an_exported_artefact_runs_in_a_fresh_process(self):
        self.run_both(export_and_save, run_artefact)

    def test_the_compilation_cache_serves_another_process(self):
        self.run_both(
            compile_and_save,
            compile_from_cache,
            JAX_COMPILATION_CACHE_DIR="{folder}/cache",
            JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
            JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        CHILDREN[sys.argv[2]](pathlib.Path(sys.argv[3]))
    else:
        absltest.main()
