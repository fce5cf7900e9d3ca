"""The settings of a training run, by platform and by command line."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
from typing import Any

from language_model import ModelSizes


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings that determine a run, with which a checkpoint must agree."""

    steps: int
    batch_size: int
    length: int
    learning_rate: float
    seed: int
    sizes: ModelSizes
    expert_ranks: int | None = None  # devices that share the experts; None for a host's
    nvlink_domain_size: int | None = None  # None for what the mesh says


CPU_SIZES = ModelSizes(
    width=128, num_layers=3, num_heads=4, num_experts=16, top_k=2, intermediate_size=64
)
CPU_SETTINGS = Settings(
    steps=450, batch_size=16, length=128, learning_rate=3e-3, seed=0, sizes=CPU_SIZES
)
GPU_SIZES = ModelSizes(
    width=512, num_layers=6, num_heads=8, num_experts=32, top_k=2, intermediate_size=256
)
GPU_SETTINGS = Settings(
    steps=3000, batch_size=32, length=512, learning_rate=1e-3, seed=0, sizes=GPU_SIZES
)


def parse_arguments(description: str) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=description,
        epilog="Defaults depend on the platform: see examples/settings.py.",
    )
    for name, kind, text in (
        ("steps", int, "batches to train on"),
        ("batch-size", int, "windows of text per batch, over all devices"),
        ("length", int, "bytes per window"),
        ("learning-rate", float, "its peak"),
        ("seed", int, "of parameters and data"),
        ("width", int, "of the model"),
        ("num-layers", int, "blocks of attention and experts"),
        ("num-heads", int, "attention heads"),
        ("num-experts", int, "experts per layer"),
        ("top-k", int, "experts per byte"),
        ("intermediate-size", int, "inner size of an expert"),
        ("expert-ranks", int, "devices that share the experts; more than a host has span hosts"),
        ("nvlink-domain-size", int, "of these, how many reach each other over NVLink"),
    ):
        parser.add_argument(f"--{name}", type=kind, metavar="N", help=text)
    parser.add_argument(
        "--cpu-devices",
        type=int,
        default=8,
        metavar="N",
        help="of a process without GPUs (default 8)",
    )
    parser.add_argument(
        "--distributed",
        action="store_true",
        help="be one of several processes, as SLURM or Kubernetes tell; see examples/launch.py",
    )
    parser.add_argument(
        "--check-dense-steps",
        type=int,
        default=50,
        metavar="N",
        help="compare N steps with dense experts; 0 leaves it out (default 50)",
    )
    parser.add_argument("--checkpoint", type=pathlib.Path, metavar="DIR", help="save and resume")
    parser.add_argument(
        "--checkpoint-every", type=int, default=100, metavar="N", help="steps between two"
    )
    parser.add_argument("--sample-bytes", type=int, default=400, metavar="N", help="0 for none")
    parser.add_argument(
        "--output",
        type=pathlib.Path,
        default=pathlib.Path("runs/moe_lm"),
        metavar="DIR",
        help="for losses.csv and plots",
    )
    return parser.parse_args()


def make_settings(arguments: argparse.Namespace, defaults: Settings) -> Settings:
    """The defaults, changed by the command line."""
    given = {k: v for k, v in vars(arguments).items() if v is not None}

    def replaced(values: Any) -> Any:
        names = {field.name for field in dataclasses.fields(values)}
        return dataclasses.replace(values, **{k: v for k, v in given.items() if k in names})

    return replaced(dataclasses.replace(defaults, sizes=replaced(defaults.sizes)))
