"""Meshes of programs lowered for CUDA: the ranks of their groups, and what XLA's partitioner adds."""

from __future__ import annotations

import functools
import json
import subprocess
import sys

import testing  # isort: skip

import jax
import numpy as np
import programs
from absl.testing import absltest, parameterized
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from programs import lower_for_cuda, struct

RANKS = testing.NUM_DEVICES


def mapped(mesh, **kwargs):
    kwargs = kwargs | {"in_specs": P("expert"), "out_specs": P("expert")}
    return jax.shard_map(testing.expert_layer, mesh=mesh, **kwargs)


class MeshesTest(parameterized.TestCase):
    """replica_groups: logical ids, row-major over the mesh, ranks of a group in order."""

    SHAPE = testing.two_axes()
    IDS = np.arange(RANKS).reshape(SHAPE)

    def groups(self, names, axis_name, **kwargs):
        mesh = testing.mesh_of(self.SHAPE, names)
        f = jax.shard_map(
            functools.partial(testing.expert_layer, axis_name=axis_name),
            mesh=mesh,
            in_specs=P(axis_name),
            out_specs=P(axis_name),
            **kwargs,
        )
        program = lower_for_cuda(f, *testing.layer_arguments(hidden=64))
        size = int(
            np.prod(
                [mesh.shape[a] for a in ([axis_name] if isinstance(axis_name, str) else axis_name)]
            )
        )
        found = set()
        for call in program.calls:
            if "replica_groups" in call.attributes:
                self.assertEqual(call.attributes["group_size"], ("i64", size))
                found.add(tuple(call.attributes["replica_groups"][1]))
        (groups,) = found
        return np.array(groups).reshape(-1, size).tolist()

    @parameterized.parameters({}, {"axis_names": {"expert"}}, {"check_vma": False})
    def test_one_axis_of_two(self, **kwargs):
        self.assertEqual(self.groups(("data", "expert"), "expert", **kwargs), self.IDS.tolist())
        self.assertEqual(self.groups(("expert", "data"), "expert", **kwargs), self.IDS.T.tolist())

    def test_two_axes(self):
        self.assertEqual(self.groups(("a", "b"), ("a", "b")), [self.IDS.ravel().tolist()])
        self.assertEqual(self.groups(("a", "b"), ("b", "a")), [self.IDS.T.ravel().tolist()])


def collectives_of_partitioned_programs() -> dict[str, list[str]]:
    """The collectives that XLA's partitioner adds where a mesh axis is left to it, by how x is sharded."""
    mesh = testing.mesh_of((2, RANKS // 2) if RANKS > 1 else (1, 1), ("data", "expert"))
    shapes = [struct(a.shape, a.dtype) for a in testing.layer_arguments(hidden=64)]
    partial = mapped(mesh, axis_names={"expert"})
    programs_by_name = {"full_manual": lower_for_cuda(mapped(testing.expert_mesh()), *shapes)}
    for name, x_spec in ("replicated", P("expert")), ("sharded", P("expert", "data")):
        specs = [P("expert"), x_spec, P("expert"), P("expert")]
        placed = [
            struct(a.shape, a.dtype, NamedSharding(mesh, spec))
            for a, spec in zip(shapes, specs, strict=True)
        ]
        programs_by_name[name] = lower_for_cuda(partial, *placed)
    return {
        name: programs.partitioned_collectives(program.partitioned())
        for name, program in programs_by_name.items()
    }


class PartitionedTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        # In its own process, because handlers cannot be taken back.
        command = [sys.executable, __file__, "--partition"]
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        cls.collectives = json.loads(result.stdout)

    def test_full_manual_needs_no_collective(self):
        self.assertEmpty(self.collectives["full_manual"])

    def test_replicated_operands_need_no_collective(self):
        self.assertEmpty(self.collectives["replicated"])

    def test_sharded_operands_are_gathered_once(self):
        self.assertEqual(self.collectives["sharded"], ["all-gather"] if RANKS > 1 else [])


if __name__ == "__main__":
    if "--partition" in sys.argv:
        print(json.dumps(collectives_of_partitioned_programs()))
    else:
        absltest.main()
