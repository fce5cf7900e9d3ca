"""Checkpoints with mistakes, one for each message of jax_ep.checkpoints."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
import sys
import tempfile
import unittest.mock

import numpy as np

from jax_ep import checkpoints
from jax_ep._src.checkpoints.tensors import INDEX

DATA = pathlib.Path(__file__).parents[2] / "data" / "checkpoints"
MAXTEXT = {
    "gate": {"kernel": np.ones((4, 8))},
    "wi_0": np.ones((8, 4, 6)),
    "wi_1": np.ones((8, 4, 6)),
    "wo": np.ones((8, 6, 4)),
}
LATENT = {"router_kernel": None, "w_up": np.ones((2, 3)), "w_down": None, "latent_in": None}


def options(family="minimax_m2", **changes):
    """moe_options of a config with some entries changed, or left out by None."""
    config = json.loads((DATA / family / "config.json").read_text()) | changes
    return checkpoints.moe_options({k: v for k, v in config.items() if v is not None})


def load(change, family="minimax_m2"):
    """load of a copied folder, after a change of it."""
    with tempfile.TemporaryDirectory() as given:
        folder = pathlib.Path(given) / family
        shutil.copytree(DATA / family, folder)
        change(folder)
        checkpoints.load(folder)


def replaced(old: bytes, new: bytes, name="model.safetensors"):
    """Replaces bytes of a file by as many others."""

    def change(folder):
        path = folder / name
        assert len(old) == len(new) and old in path.read_bytes()
        path.write_bytes(path.read_bytes().replace(old, new))

    return change


def cut(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def load_of_another_quantization():
    def change(folder):
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "awq"}
        (folder / "config.json").write_text(json.dumps(config))

    load(change)


def save(layers):
    """save with other layers."""
    loaded = checkpoints.load(DATA / "minimax_m2")
    with tempfile.TemporaryDirectory() as folder:
        changed = dataclasses.replace(loaded, layers=layers(loaded.layers))
        try:
            checkpoints.save(f"{folder}/new", changed)
        finally:
            assert not pathlib.Path(folder, "new").exists()


def load_without_rich():
    with unittest.mock.patch.dict(sys.modules, {"rich.progress": None}):
        checkpoints.load(DATA / "minimax_m2", progress=True)


PRODUCERS = {
    "ArgumentError": [
        lambda: options(architectures=["BertModel"]),
        lambda: options(hidden_size=None),
        lambda: options(hidden_act="gelu"),
        lambda: options("deepseek_v2", topk_method="noaux_tc"),
        lambda: checkpoints.load(DATA),
        lambda: load(lambda folder: (folder / "model.safetensors").unlink()),
        lambda: load(cut),
        lambda: load(replaced(b"model.norm.weight", b"model.norm.Weight", INDEX), "mixtral"),
        lambda: load(replaced(b'"F32"', b'"F42"')),
        lambda: load(replaced(b"moe.gate.weight", b"moe.Gate.weight")),
        lambda: load(replaced(b'"hidden_size": 32', b'"hidden_size": 16', "config.json")),
        lambda: checkpoints.save(DATA / "minimax_m2", checkpoints.load(DATA / "minimax_m2")),
        load_of_another_quantization,
        lambda: save(lambda layers: {}),
        lambda: save(lambda layers: layers | {0: {}}),
        lambda: checkpoints.from_maxtext({}, gate_bias="bias"),
        lambda: checkpoints.from_maxtext({"mlp": {}}),
        lambda: checkpoints.from_maxtext({"gate": {}}),
        lambda: checkpoints.to_maxtext(LATENT),
        lambda: checkpoints.from_maxtext(MAXTEXT, scan_axis=1),
    ],
    "MissingExtensionError": [load_without_rich],
}
