"""Saving a run with orbax, and going on from the newest checkpoint, on any number of devices."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp
from training_report import History


class Checkpoints:
    """The checkpoints of one run in a folder; without a folder nothing is saved.

    A checkpoint holds parameters, optimizer state and history. What else a run depends on follows
    from the settings and the number of steps done.
    """

    def __init__(self, folder: pathlib.Path | None, every: int, settings: dict[str, Any]):
        self._every = every
        self._manager = None
        if folder is None:
            return
        _check_settings(folder, settings)
        self._manager = ocp.CheckpointManager(
            folder.absolute(),
            options=ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False),
        )

    def maybe_save(self, num_steps: int, state: Any, history: History) -> None:
        """Saves if `num_steps` is a multiple of the interval."""
        if self._manager is None or num_steps % self._every:
            return
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(jax.tree.leaves(state)),
            history=ocp.args.JsonSave(history.to_json()),
        )
        self._manager.save(num_steps, args=items)

    def restore_newest(self, state: Any, history: History) -> tuple[Any, History]:
        """The newest checkpoint, placed as `state` is; the arguments if there is none."""
        if self._manager is None or (num_steps := self._manager.latest_step()) is None:
            return state, history
        leaves, structure = jax.tree.flatten(state)
        target = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for a in leaves]
        items = self._manager.restore(
            num_steps,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(target), history=ocp.args.JsonRestore()
            ),
        )
        return jax.tree.unflatten(structure, items["state"]), History.from_json(items["history"])

    def close(self) -> None:
        """Ends orbax's threads."""
        if self._manager is not None:
            self._manager.close()


def _check_settings(folder: pathlib.Path, settings: dict[str, Any]) -> None:
    """Notes the settings beside the checkpoints; those of an earlier run must be the same."""
    path = folder / "settings.json"
    if path.exists():
        earlier = json.loads(path.read_text())
        if earlier != settings:
            raise SystemExit(
                f"{folder} holds checkpoints of another run:\n  there {earlier}\n  "
                f"now   {settings}\nGive the same options, or another folder."
            )
    else:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings))
