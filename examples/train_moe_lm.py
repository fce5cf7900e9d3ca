"""Trains a byte-level mixture-of-experts language model on the source of Python's library.

Experts are spread over the devices of each host: over 8 CPU devices by default, over the GPUs where
there are any. At the end the run checks what it claims, and exits with status 1 if a claim does not
hold; a run of fewer steps than the default makes no claim about the trained model.

    python examples/train_moe_lm.py                        # minutes on a laptop
    python examples/train_moe_lm.py --checkpoint DIR       # saves; goes on from the newest there
    python examples/launch.py 2 examples/train_moe_lm.py   # the same in two processes
    python examples/launch.py --coordinator=10.0.0.1:9876 --hosts=2 --host=0 8 \
        examples/train_moe_lm.py --expert-ranks=16         # experts over two hosts, in pure JAX
    python examples/train_moe_lm.py --help
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import processes
import text_data
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from language_model import DenseMoE, LanguageModel, Losses
from run_checkpoints import Checkpoints
from settings import CPU_SETTINGS, GPU_SETTINGS, Settings, make_settings, parse_arguments
from training_report import Claim, History, plot, print_summary, progress_bar

import jax_ep
from jax_ep.nnx import MoE

EVALUATE_EVERY = 100
SHARE_STEPS = 100  # expert shares are claimed over the last so many steps
MIN_SHARE = 0.3  # as a fraction of the even share
MAX_DENSE_DIFFERENCE = 1e-4
DENSE_ORDERS = 6  # orders of a batch's windows; one has to agree


class TrainState(NamedTuple):
    """The state that a step updates."""

    params: Any
    optimizer: Any


Step = Callable[[TrainState, jax.Array], tuple[TrainState, Losses]]


# ---- model and step


def make_mesh(settings: Settings) -> Mesh:
    """All devices: as many of a host as divide the experts hold them, the others have copies."""
    of_host = math.gcd(processes.devices_per_host(), settings.sizes.num_experts)
    expert_ranks = settings.expert_ranks or of_host
    shape = (jax.device_count() // expert_ranks, expert_ranks)
    return jax_ep.make_mesh(shape, ("data", "expert"), axis_types=(AxisType.Auto,) * 2)


def by_batch(mesh: Mesh) -> NamedSharding:
    """Windows of text, split over all devices."""
    return NamedSharding(mesh, P(("data", "expert")))


def make_training(settings: Settings, moe_layer: type[MoE]) -> tuple[Any, TrainState, Step]:
    """The model's structure, its initial state (sharded as the mesh in context asks), the step."""
    layer = functools.partial(moe_layer, nvlink_domain_size=settings.nvlink_domain_size)
    model = LanguageModel(settings.sizes, moe_layer=layer, rngs=nnx.Rngs(settings.seed))
    structure, params = nnx.split(model)
    rate = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=settings.learning_rate,
        warmup_steps=min(50, settings.steps // 4),
        decay_steps=settings.steps,
        end_value=settings.learning_rate / 10,
    )
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.99))

    def step(state: TrainState, windows: jax.Array) -> tuple[TrainState, Losses]:
        def loss(params: Any) -> tuple[jax.Array, Losses]:
            losses = nnx.merge(structure, params).losses(windows)
            return losses.total(), losses

        gradients, losses = jax.grad(loss, has_aux=True)(state.params)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(params, optimizer_state), losses

    return structure, TrainState(params, optimizer.init(params)), step


def compiled(step: Step, state: TrainState, windows: jax.Array) -> jax.stages.Compiled:
    """The step for exactly these shapes and shardings; the state is updated in place."""
    shardings = jax.tree.map(lambda a: a.sharding, state)
    sharding = windows.sharding
    # Every process reads the losses.
    losses = NamedSharding(sharding.mesh, P()) if isinstance(sharding, NamedSharding) else None
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(shardings, losses))
    return jitted.lower(state, windows).compile()


def training_windows(corpus: text_data.Corpus, settings: Settings, step: int) -> np.ndarray:
    """The batch of a step."""
    return text_data.batch(
        corpus.training,
        step,
        seed=settings.seed,
        batch_size=settings.batch_size,
        length=settings.length,
    )


# ---- the runs


def first_losses(
    settings: Settings,
    corpus: text_data.Corpus,
    num_steps: int,
    moe_layer: type[MoE],
    *,
    order: int = 0,
) -> list[float]:
    """The first losses with these expert layers: `MoE` over all devices, `DenseMoE` on one.

    The windows of a batch come in an order of that number, which is the same but for rounding.
    """
    sharded = moe_layer is MoE
    mesh = make_mesh(settings)
    result: list[float] = []
    with jax.set_mesh(mesh) if sharded else contextlib.nullcontext(), progress_bar() as bar:

        def windows(i: int) -> jax.Array:
            rows = training_windows(corpus, settings, i)
            if order:
                rows = np.random.default_rng([order, i]).permutation(rows)
            batch = jnp.asarray(rows)
            return jax.device_put(batch, by_batch(mesh)) if sharded else batch

        _, state, step = make_training(settings, moe_layer)
        if sharded:
            state = jax.device_put(state, nnx.get_named_sharding(state, mesh))
        run = compiled(step, state, windows(0))
        task = bar.add_task(
            "experts over all devices" if sharded else "dense experts", total=num_steps, info=""
        )
        for i in range(num_steps):
            state, losses = run(state, windows(i))
            result.append(float(losses.cross_entropy))
            bar.update(task, advance=1, info=f"loss {result[-1]:.3f}")
    return result


def difference(losses: list[float], others: list[float]) -> float:
    """The largest of all steps, or NaN if there is one: numpy's maximum keeps it."""
    return float(np.abs(np.subtract(losses, others)).max())


def train(
    settings: Settings,
    corpus: text_data.Corpus,
    checkpoints: Checkpoints,
    loss_file: pathlib.Path,
) -> tuple[Any, Any, History, str]:
    """Trains to the end, from the newest checkpoint if there is one.

    Returns:
      The model's structure, the trained parameters, the history, and the compiled step's text.
    """
    mesh = make_mesh(settings)
    with jax.set_mesh(mesh):
        structure, state, step = make_training(settings, MoE)
        state = jax.device_put(state, nnx.get_named_sharding(state, mesh))
        state, history = checkpoints.restore_newest(state, History())
        if history.losses:
            print(f"resumed after step {len(history.losses)}")

        def put(windows: np.ndarray) -> jax.Array:
            return jax.device_put(windows, by_batch(mesh))

        start = time.monotonic()
        run = compiled(step, state, put(training_windows(corpus, settings, 0)))
        print(f"compiled for {dict(mesh.shape)} in {time.monotonic() - start:.0f} s")
        cross_entropy = jax.jit(lambda p, w: nnx.merge(structure, p).losses(w).cross_entropy)

        def held_out_loss(params: Any, num_batches: int) -> float:
            count = num_batches * settings.batch_size
            windows = text_data.windows(corpus.held_out, count, settings.length)
            batches = np.split(windows, num_batches)
            return float(np.mean([cross_entropy(params, put(b)) for b in batches]))

        with progress_bar() as bar, loss_file.open("w") as log:
            log.write("step,loss\n")
            log.writelines(f"{i},{loss!r}\n" for i, loss in enumerate(history.losses))
            done = len(history.losses)
            task = bar.add_task("training", total=settings.steps, completed=done, info="")
            for i in range(done, settings.steps):
                state, losses = run(state, put(training_windows(corpus, settings, i)))
                history.append(float(losses.cross_entropy), np.asarray(losses.expert_load))
                log.write(f"{i},{history.losses[-1]!r}\n")
                log.flush()
                bar.update(task, advance=1, info=f"loss {history.losses[-1]:.3f}")
                done = i + 1
                if done % EVALUATE_EVERY == 0 or done == settings.steps:
                    is_last = done == settings.steps
                    history.held_out[done] = held_out_loss(state.params, 32 if is_last else 4)
                    bar.console.print(
                        f"step {done:5d}   loss {np.mean(history.losses[-50:]):.3f}   "
                        f"held-out {history.held_out[done]:.3f}   "
                        f"smallest expert share {history.smallest_share(50):.2f}/E"
                    )
                checkpoints.maybe_save(done, state, history)
    checkpoints.close()
    return structure, state.params, history, run.as_text() or ""


def sample(structure: Any, params: Any, prompt: bytes, count: int, length: int) -> bytes:
    """Draws `count` bytes after `prompt`, on a mesh of one device."""
    text = np.zeros((1, len(prompt) + count), np.int32)
    text[0, : len(prompt)] = list(prompt)

    @jax.jit
    def drawn(params: Any, text: jax.Array) -> jax.Array:
        model = nnx.merge(structure, params)

        def draw(position: jax.Array, text: jax.Array) -> jax.Array:
            # The causal mask hides what is not written yet.
            start = jnp.maximum(position - length, 0)
            window = jax.lax.dynamic_slice_in_dim(text, start, min(length, text.shape[1]), axis=1)
            logits = model(window)[0][0, position - start - 1]
            key = jax.random.fold_in(jax.random.key(0), position)
            return text.at[0, position].set(jax.random.categorical(key, logits / 0.7))

        return jax.lax.fori_loop(len(prompt), text.shape[1], draw, text)

    auto = (AxisType.Auto,)
    mesh = jax_ep.make_mesh((1,), ("expert",), axis_types=auto, devices=jax.local_devices())
    params = jax.device_put(multihost_utils.process_allgather(params, tiled=True), mesh.devices[0])
    with jax.set_mesh(mesh):
        return bytes(np.asarray(drawn(params, jnp.asarray(text)))[0].astype(np.uint8))


# ---- claims


def check_claims(
    history: History,
    ngrams: dict[str, float],
    dense: list[float],
    sharded: list[float],
    hlo: str,
    on_gpu: bool,
    *,
    full_steps: int,
) -> list[Claim]:
    """Everything this run claims, and whether it holds. `dense` and `sharded` are first losses.

    Claims about the trained model need `full_steps`.
    """
    claims: list[Claim] = []
    if len(history.losses) >= full_steps:
        baseline = "trigram" if on_gpu else "bigram"
        held_out = history.held_out[len(history.losses)]
        share = history.smallest_share(SHARE_STEPS)
        claims += [
            Claim(
                f"held-out loss is below that of a byte {baseline} model",
                f"{held_out:.4f} < {ngrams[baseline]:.4f}",
                held_out < ngrams[baseline],
            ),
            Claim(
                f"every expert gets at least {MIN_SHARE}/E of the last {SHARE_STEPS} steps' tokens",
                f"{share:.3f} >= {MIN_SHARE}",
                share >= MIN_SHARE,
            ),
        ]
    if dense:
        from_dense = difference(sharded, dense)
        claims.append(
            Claim(
                f"the first {len(dense)} losses are those of dense, unsharded experts",
                f"{from_dense:.1e} <= {MAX_DENSE_DIFFERENCE}",
                from_dense <= MAX_DENSE_DIFFERENCE,
            )
        )
    if on_gpu:
        count = hlo.count('custom_call_target="jax_ep.')
        claims.append(
            Claim("jax_ep's kernels are in the compiled step", f"{count} calls", count > 0)
        )
    return claims


def main() -> int:
    """Trains, checks, reports."""
    arguments = parse_arguments((__doc__ or "").split("\n\n")[0])
    processes.join(distributed=arguments.distributed)
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", arguments.cpu_devices)  # GPUs do not mind
    # Otherwise GPUs round float32 to TF32, and the comparison with dense experts means little.
    jax.config.update("jax_default_matmul_precision", "highest")
    on_gpu = jax.default_backend() == "gpu"
    defaults = GPU_SETTINGS if on_gpu else CPU_SETTINGS
    settings = make_settings(arguments, defaults)
    arguments.output = processes.output_folder(arguments.output)
    start = time.monotonic()

    corpus = text_data.standard_library()
    print(
        f"{corpus.num_files} files of Python's library: {len(corpus.training) / 1e6:.1f} MB to "
        f"train on, {len(corpus.held_out) / 1e6:.1f} MB held out; "
        f"{jax.device_count()} {jax.devices()[0].device_kind} devices"
    )
    # Compared is a small model. A large one is chaotic: with no more than its batches in reverse
    # order, the dense model with GPU_SETTINGS is 3e-2 off after 50 steps on an H200.
    compared = CPU_SETTINGS if on_gpu else settings
    num_steps = min(arguments.check_dense_steps, compared.steps)
    dense: list[float] = []
    sharded: list[float] = []
    if num_steps:
        dense = first_losses(compared, corpus, num_steps, DenseMoE)
    if num_steps and compared != settings:
        sharded = first_losses(compared, corpus, num_steps, MoE)
    checkpoints = Checkpoints(
        arguments.checkpoint, arguments.checkpoint_every, dataclasses.asdict(settings)
    )
    structure, params, history, hlo = train(
        settings, corpus, checkpoints, arguments.output / "losses.csv"
    )
    held_out = text_data.windows(corpus.held_out, 32 * settings.batch_size, settings.length)
    ngrams = text_data.ngram_losses(corpus.training, held_out)
    sharded = sharded or history.losses[:num_steps]
    # Where two experts' scores are all but equal, rounding decides which one gets a token, and
    # one such token shows after some 20 steps: dense experts then differ from themselves as much.
    for order in range(1, DENSE_ORDERS):
        if not dense or difference(sharded, dense) <= MAX_DENSE_DIFFERENCE:
            break
        dense = first_losses(compared, corpus, num_steps, DenseMoE, order=order)
    claims = check_claims(history, ngrams, dense, sharded, hlo, on_gpu, full_steps=defaults.steps)
    plot(history, ngrams, arguments.output, min_share=MIN_SHARE)
    if arguments.sample_bytes:
        text = sample(structure, params, b"def ", arguments.sample_bytes, settings.length)
        print("\na sample:\n" + text.decode("utf-8", "replace") + "\n")
    print_summary(history, ngrams, claims, seconds=time.monotonic() - start)
    if settings.steps < defaults.steps:
        print(
            f"A trained model takes all {defaults.steps} steps: not claimed after {settings.steps}."
        )
    return 0 if all(claim.holds for claim in claims) else 1


if __name__ == "__main__":
    sys.exit(main())
