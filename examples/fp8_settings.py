"""The settings of train_fp8.py: those for a GPU, and small ones."""

from __future__ import annotations

import dataclasses

import olmoe_model as model
import text_data


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a run. All sizes of experts are multiples of 128."""

    sizes: model.Sizes
    steps: int
    evaluate_every: int
    batch_size: int  # windows of text per step, over all devices
    length: int  # bytes per window
    learning_rate: float
    held_out_batches: int
    seeds: int  # runs of each recipe, which differ in first parameters and batches


LARGE = Settings(
    model.Sizes(
        hidden=512, num_layers=2, num_heads=8, num_experts=16, top_k=4, intermediate=512,
        vocabulary=text_data.VOCABULARY,
    ),
    steps=1500, evaluate_every=100, batch_size=32, length=512, learning_rate=5e-4,
    held_out_batches=16, seeds=3,
)  # fmt: skip
SMALL = Settings(
    model.Sizes(
        hidden=128, num_layers=2, num_heads=4, num_experts=8, top_k=2, intermediate=128,
        vocabulary=text_data.VOCABULARY,
    ),
    steps=300, evaluate_every=25, batch_size=8, length=128, learning_rate=3e-3,
    held_out_batches=16, seeds=1,
)  # fmt: skip
