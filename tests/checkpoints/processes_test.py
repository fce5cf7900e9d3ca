"""Several processes load and save one checkpoint, each the part of its devices.

As a program, it is what each of the processes runs.
"""

from __future__ import annotations

import json
import pathlib
import sys
import tempfile

import launcher  # isort: skip

import testing  # isort: skip

import jax
import numpy as np
from absl.testing import absltest, parameterized

from jax_ep import checkpoints
from jax_ep._src.checkpoints.tensors import Tensors

FOLDER = pathlib.Path(__file__).parents[1] / "data" / "checkpoints" / "mixtral"
CPU = {"JAX_EP_TEST_DEVICES": "1", "JAX_PLATFORMS": "cpu"}


def program(folder):
    """Loads twice, saves twice, and says how much was read."""
    count = jax.device_count()
    mesh = testing.mesh_of((count,), ("expert",))
    loaded = checkpoints.load(FOLDER, mesh=mesh)
    checkpoints.save(folder / "experts", loaded)
    # H over processes: each matrix has to be gathered
    mesh = testing.mesh_of((count, 1), ("data", "expert"))
    split = checkpoints.load(FOLDER, mesh=mesh, fsdp_axis="data")
    checkpoints.save(folder / "hidden", split)
    read = {"experts": loaded.bytes_read, "hidden": split.bytes_read}
    (folder / f"{jax.process_index()}.json").write_text(json.dumps(read))


class ProcessesTest(parameterized.TestCase):
    @parameterized.parameters(2, 4)
    def test_load_and_save(self, count):
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        launcher.run_well([__file__, str(folder)], processes=count, environment=CPU)
        source = Tensors(FOLDER)
        sizes = {name: source.view(name).nbytes for name in source}
        experts = sum(size for name, size in sizes.items() if ".experts." in name)
        expected = sum(sizes.values()) - experts + experts // count
        for process in range(count):
            read = json.loads((folder / f"{process}.json").read_text())
            self.assertEqual(read, {"experts": expected, "hidden": expected})
        for name in "experts", "hidden":
            saved = Tensors(folder / name)
            self.assertEqual({*saved}, {*source})
            for tensor in source:
                testing.assert_bitwise(saved.view(tensor), np.asarray(source.view(tensor)), tensor)
        self.assertLen([*(folder / "experts").glob("*.safetensors")], count)


if __name__ == "__main__":
    if len(sys.argv) == 2 and jax.process_count() > 1:
        program(pathlib.Path(sys.argv[1]))
    else:
        absltest.main()
