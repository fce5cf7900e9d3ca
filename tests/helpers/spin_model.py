"""Describes with what a Spin model of tests/protocol/ is checked."""

from __future__ import annotations

import dataclasses

Settings = dict[str, int]  # macros of a model


@dataclasses.dataclass(frozen=True)
class Model:
    """A model, and the labels that its text and the comments of the modeled code have in common."""

    label: str
    settings: dict[str, Settings]
    mutations: tuple[
        tuple[str, str, Settings], ...
    ]  # name, how it fails, settings in which it does


# How a mutation fails: an assertion, such as that a read finds the right data; or no step is possible.
WRONG, STUCK = "assertion violated", "invalid end state"
