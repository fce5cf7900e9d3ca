"""Fine-tunes a checkpoint of Hugging Face's by LoRA: Mixtral, Qwen3-MoE or OLMoE.

Pairs of thin matrices beside those of all experts and of attention are trained by AdamW; everything
else stays as it was. A run may be saved, and go on later on another number of devices, from the
newest state of adapters and optimizer. At the end the adapters are added to the weights, and the
result is a checkpoint again, for examples/generate.py or transformers.

    python examples/finetune.py                              # a small random model
    python examples/finetune.py DIR --text book.txt --output tuned
    python examples/finetune.py DIR --checkpoint runs/lora   # saves; goes on from the newest there
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import text_data
from checkpoint_models import lora
from checkpoint_models.model import Adapters, CheckpointModel, Params, load, make_mesh
from checkpoint_models.small import write_small
from checkpoint_models.text import Text
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from run_checkpoints import Checkpoints
from training_report import History, progress_bar

from jax_ep import checkpoints


class TrainState(NamedTuple):
    """The state that a step updates."""

    adapters: Adapters
    optimizer: Any


Step = Callable[[TrainState, Params, jax.Array], tuple[TrainState, tuple[jax.Array, jax.Array]]]


def make_training(
    model: CheckpointModel, params: Params, *, rank: int, learning_rate: float, seed: int
) -> tuple[TrainState, Step]:
    """Returns the first state, and the step from a state, `Params` and windows of tokens."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(learning_rate))
    adapters = lora.make_adapters(model, params, rank, seed)

    def placed(array: jax.Array) -> jax.Array:
        on_mesh = isinstance(array.sharding, NamedSharding)
        return array if on_mesh else jax.device_put(array, NamedSharding(model.mesh, P()))

    state = TrainState(adapters, jax.tree.map(placed, optimizer.init(adapters)))

    def step(
        state: TrainState, params: Params, windows: jax.Array
    ) -> tuple[TrainState, tuple[jax.Array, jax.Array]]:
        def loss(adapters: Adapters) -> tuple[jax.Array, jax.Array]:
            return losses(model, params, adapters, windows)

        results, gradients = jax.value_and_grad(loss, has_aux=True)(state.adapters)
        updates, moments = optimizer.update(gradients, state.optimizer, state.adapters)
        return TrainState(optax.apply_updates(state.adapters, updates), moments), results

    shardings = jax.tree.map(lambda a: a.sharding, state)
    whole = NamedSharding(model.mesh, P())
    return state, jax.jit(step, donate_argnums=0, out_shardings=(shardings, (whole, whole)))


def losses(
    model: CheckpointModel, params: Params, adapters: Adapters | None, windows: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Predicts all but the first of int32[batch, length + 1]: nats per token, and loads."""
    tokens = windows[:, :-1]
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    x, _, stats = model(params, tokens, positions, adapters=adapters)
    nats = optax.softmax_cross_entropy_with_integer_labels(model.logits(params, x), windows[:, 1:])
    return nats.mean(), jnp.stack([of_layer.expert_load for of_layer in stats])


def train(
    model: CheckpointModel,
    params: Params,
    training: tuple[TrainState, Step],
    batches: Callable[[int], np.ndarray],
    num_steps: int,
    saved: Checkpoints,
    report: Callable[[History], None] = lambda history: None,
) -> tuple[TrainState, History]:
    """Goes on from the newest state that was saved, and reports after each step."""
    state, step = training
    state, history = saved.restore_newest(state, History())
    sharding = NamedSharding(model.mesh, P("expert"))
    for index in range(len(history.losses), num_steps):
        windows = jax.device_put(batches(index), sharding)
        state, (loss, loads) = step(state, params, windows)
        history.append(float(loss), np.asarray(loads))
        saved.maybe_save(index + 1, state, history)
        report(history)
    return state, history


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("folder", nargs="?", type=pathlib.Path, help="a checkpoint; without one, a small model")
    add("--text", type=pathlib.Path, metavar="FILE", help="default: the source of Python's library")
    add("--steps", type=int, default=100, metavar="N", help="batches to train on (default 100)")
    add("--batch-size", type=int, default=16, metavar="N", help="windows of text (default 16)")
    add("--length", type=int, default=128, metavar="N", help="tokens per window (default 128)")
    add("--rank", type=int, default=8, metavar="N", help="of each pair of matrices (default 8)")
    add("--learning-rate", type=float, default=1e-3, metavar="X", help="default 1e-3")
    add("--seed", type=int, default=0, metavar="N", help="of adapters and batches")
    add("--checkpoint", type=pathlib.Path, metavar="DIR", help="save and resume")
    add("--checkpoint-every", type=int, default=100, metavar="N", help="steps between two")
    add("--output", type=pathlib.Path, metavar="DIR", help="a new folder for the tuned checkpoint")
    add("--expert-parallel", type=int, metavar="N", help="devices (default: all)")
    return parser.parse_args()


def read_text(path: pathlib.Path | None, text: Text, vocabulary: int) -> np.ndarray:
    """Returns the tokens to train on."""
    source = path.read_bytes() if path else text_data.standard_library().training.tobytes()
    tokens = text.corpus(source if text.tokenizer is None else source[: 1 << 24])
    if tokens.max() >= vocabulary:
        raise SystemExit(
            f"the text has the token {tokens.max()}, and the model a vocabulary of {vocabulary}; "
            "expected a tokenizer.json that belongs to the model, or 256 tokens for bytes."
        )
    return tokens


def main() -> None:
    """Loads, trains, and writes."""
    arguments = parse_arguments()
    console = Console()
    mesh = make_mesh(arguments.expert_parallel)
    temporary = tempfile.TemporaryDirectory()
    folder = arguments.folder or write_small(pathlib.Path(temporary.name))
    model, params, loaded = load(folder, mesh, experts_fn=lora.experts, remat="experts")
    tokens = read_text(arguments.text, Text(folder), model.config["vocab_size"])
    settings = {name: getattr(arguments, name) for name in ("rank", "learning_rate", "seed")}
    training = make_training(model, params, **settings)
    count = sum(a.size for a in jax.tree.leaves(training[0].adapters))
    console.print(f"{count / 1e6:.2f} million parameters are trained, on {mesh.size} devices")
    of_batch = {name: getattr(arguments, name) for name in ("seed", "batch_size", "length")}
    batches = functools.partial(text_data.batch, tokens, **of_batch)
    saved = Checkpoints(arguments.checkpoint, arguments.checkpoint_every, settings | of_batch)
    with progress_bar() as bar:
        task = bar.add_task("finetune", total=arguments.steps, info="compiling")

        def report(history: History) -> None:
            info = f"loss {history.losses[-1]:.3f}"
            bar.update(task, completed=len(history.losses), info=info)

        state, history = train(model, params, training, batches, arguments.steps, saved, report)
    saved.close()
    first, last = (float(np.mean(part)) for part in (history.losses[:10], history.losses[-10:]))
    console.print(f"loss {first:.3f} in the first ten steps, {last:.3f} in the last ten")
    if arguments.output:
        checkpoints.save(arguments.output, lora.merge(loaded, state.adapters))
        console.print(f"{arguments.output} is written.")
    temporary.cleanup()


if __name__ == "__main__":
    main()
