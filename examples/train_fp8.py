"""Trains one language model with experts in bfloat16 and in FP8, and compares held-out losses.

All recipes start from the same parameters and read the same batches, which a seed determines.
Parameters and AdamW's moments are float32, everything but the experts' matmuls is bfloat16. A
recipe (docs/guides/quantization.md) quantizes rows and weights in the forward pass, cotangents and
weights for the gradients of rows, and dispatch sends eight-bit rows. The text is the source of
Python's library. The exit status is 1 unless block128 ends within 1 % of the held-out loss of
bfloat16 in the mean of all seeds, or within 3 % with --small: its few steps vary by 1 %.

    python examples/train_fp8.py                           # three minutes on one H200
    python examples/train_fp8.py --expert-parallel 4       # experts over four devices
    python examples/train_fp8.py --recipes bfloat16 block128 --steps 3000
    python examples/train_fp8.py --small                   # a small model, also on a CPU
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import os
import pathlib
import sys
import time
from typing import Any, NamedTuple

import fp8_report as report
import jax
import jax.numpy as jnp
import numpy as np
import olmoe_model as model
import optax
import text_data
from fp8_settings import LARGE, SMALL, Settings
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from training_report import progress_bar

import jax_ep
from jax_ep import quant

RECIPES = {
    "bfloat16": None,
    "block128": quant.Recipe(quantized_dispatch=True),
    "block128_cotangents": quant.Recipe(quantized_dispatch=True, quantized_cotangents=True),
    "block128_gradients": quant.Recipe(
        quantized_dispatch=True, quantized_cotangents=True, quantized_weight_gradients=True
    ),
    "row": quant.Recipe(quant.Fp8Row(), quantized_dispatch=True),
    "row_e5m2": quant.Recipe(
        quant.Fp8Row(), quant.Fp8Row(jnp.float8_e5m2), quantized_dispatch=True
    ),
}
CLAIMED = "block128"  # ends within this of bfloat16's held-out loss:
MOST_DIFFERENCE, MOST_DIFFERENCE_OF_SMALL = 0.01, 0.03


class State(NamedTuple):
    """The state that a step updates."""

    params: model.Params
    optimizer: Any


class Program(NamedTuple):
    """A recipe's compiled functions."""

    recipe: str
    steps: jax.stages.Compiled  # as many as are between two evaluations
    loss: jax.stages.Compiled


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        epilog="Defaults are LARGE in examples/fp8_settings.py, or SMALL.",
    )
    names = tuple(RECIPES)
    parser.add_argument("--recipes", nargs="+", choices=names, default=names)
    for field in dataclasses.fields(Settings):
        if field.name != "sizes":
            kind = float if field.name == "learning_rate" else int
            option = f"--{field.name.replace('_', '-')}"
            parser.add_argument(option, type=kind, metavar="X" if kind is float else "N")
    parser.add_argument("--expert-parallel", type=int, default=1, metavar="N", help="devices")
    parser.add_argument("--small", action="store_true", help="a small model")
    output = pathlib.Path("runs/fp8")
    parser.add_argument("--output", type=pathlib.Path, default=output, metavar="DIR")
    return parser.parse_args()


class Training:
    """Holds what all runs share: settings, mesh, text, optimizer."""

    def __init__(self, settings: Settings, num_devices: int) -> None:
        self.settings = settings
        self.mesh = jax_ep.make_mesh((num_devices,), ("expert",), axis_types=(AxisType.Auto,))
        self.corpus = text_data.standard_library()
        rate = optax.warmup_cosine_decay_schedule(
            init_value=0.0,
            peak_value=settings.learning_rate,
            warmup_steps=min(50, settings.steps // 4),
            decay_steps=settings.steps,
            end_value=settings.learning_rate / 10,
        )
        self.optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.99))

    def windows(self, first: int, seed: int) -> jax.Array:
        """The batches of the steps up to the next evaluation."""
        settings = self.settings
        batches = [
            text_data.batch(
                self.corpus.training,
                step,
                seed=seed,
                batch_size=settings.batch_size,
                length=settings.length,
            )
            for step in range(first, first + settings.evaluate_every)
        ]
        return jax.device_put(np.stack(batches), NamedSharding(self.mesh, P(None, "expert")))

    def held_out(self) -> list[jax.Array]:
        """The batches that held-out losses are of."""
        count = self.settings.held_out_batches
        windows = text_data.windows(
            self.corpus.held_out, count * self.settings.batch_size, self.settings.length
        )
        sharding = NamedSharding(self.mesh, P("expert"))
        return [jax.device_put(batch, sharding) for batch in np.split(windows, count)]

    def start(self, name: str, state: State) -> Program:
        """Compiles a recipe's functions for such a state."""
        sizes = self.settings.sizes
        experts = expert_layer(RECIPES[name], self.mesh)

        def losses(params: model.Params, windows: jax.Array) -> model.Losses:
            return model.losses(in_bfloat16(params), windows, sizes, experts)

        def step(state: State, windows: jax.Array) -> tuple[State, jax.Array]:
            def loss(params: model.Params) -> tuple[jax.Array, jax.Array]:
                found = losses(params, windows)
                return found.total(), found.cross_entropy

            gradients, cross_entropy = jax.grad(loss, has_aux=True)(state.params)
            updates, optimizer = self.optimizer.update(gradients, state.optimizer, state.params)
            return State(optax.apply_updates(state.params, updates), optimizer), cross_entropy

        shardings = jax.tree.map(lambda a: a.sharding, state)
        steps = jax.jit(
            lambda state, windows: jax.lax.scan(step, state, windows),
            donate_argnums=0,
            out_shardings=(shardings, NamedSharding(self.mesh, P())),
        )
        loss = jax.jit(lambda params, windows: losses(params, windows).cross_entropy)
        return Program(
            name,
            steps.lower(state, self.windows(0, 0)).compile(),
            loss.lower(state.params, self.held_out()[0]).compile(),
        )

    def first_state(self, seed: int) -> State:
        """The state before the first step."""
        params = model.initialize(self.settings.sizes, self.mesh, jnp.float32, seed)
        replicated = NamedSharding(self.mesh, P())
        moments = jax.tree.map(
            lambda a: a if a.ndim else jax.device_put(a, replicated), self.optimizer.init(params)
        )
        return State(params, moments)


def expert_layer(recipe: quant.Recipe | None, mesh: jax.sharding.Mesh) -> model.Experts:
    """The experts over all devices; their weights are float32."""

    def layer(x: Any, ids: Any, weights: Any, w_up: Any, w_down: Any) -> jax.Array:
        y, _ = jax_ep.moe_mlp(
            x, ids, weights, w_up, w_down, axis_name="expert", quantization=recipe
        )
        return y

    return jax.shard_map(layer, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))


def in_bfloat16(params: model.Params) -> model.Params:
    """Casts all parameters but those of experts, which the layer casts or quantizes."""
    layers = params.layers
    cast = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)
    return cast._replace(layers=cast.layers._replace(w_up=layers.w_up, w_down=layers.w_down))


def train(
    training: Training, programs: list[Program], device: str, folder: pathlib.Path
) -> list[report.Run]:
    """Trains by all recipes in turn, from one evaluation to the next; then with the next seed.

    Returns:
      The records, which are written after every round: a run that is cut off leaves as many steps
      of each recipe.
    """
    settings = training.settings
    runs = [report.Run(program.recipe) for program in programs]
    held_out = training.held_out()
    with progress_bar() as bar:
        task = bar.add_task("training", total=settings.seeds * settings.steps, info="")
        for seed in range(settings.seeds):
            states = [training.first_state(seed) for _ in programs]
            for run in runs:
                run.begin()
            for first in range(0, settings.steps, settings.evaluate_every):
                windows = training.windows(first, seed)
                for index, (program, run) in enumerate(zip(programs, runs, strict=True)):
                    begin = time.perf_counter()
                    states[index], losses = program.steps(states[index], windows)
                    run.losses[-1] += np.asarray(losses).tolist()
                    run.seconds += time.perf_counter() - begin
                    found = [program.loss(states[index].params, batch) for batch in held_out]
                    run.held_out[-1][first + settings.evaluate_every] = float(np.mean(found))
                report.write(runs, device, folder)
                info = ", ".join(f"{run.lasts()[-1]:.4f}" for run in runs)
                bar.update(task, advance=settings.evaluate_every, info=f"held-out {info}")
    return runs


def main() -> int:
    """Trains, and draws; 1 if block128 ends too far from bfloat16."""
    arguments = parse_arguments()
    console = Console()
    num_devices = arguments.expert_parallel
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", num_devices)  # GPUs do not mind
    if jax.device_count() < num_devices:
        console.print(
            f"--expert-parallel {num_devices} needs as many devices; here are "
            f"{jax.device_count()}.",
            style="red",
        )
        return 2
    names = {field.name for field in dataclasses.fields(Settings)}
    given = {k: v for k, v in vars(arguments).items() if k in names and v is not None}
    settings = dataclasses.replace(SMALL if arguments.small else LARGE, **given)
    if settings.steps % settings.evaluate_every:
        console.print(
            f"--steps {settings.steps} is no multiple of --evaluate-every "
            f"{settings.evaluate_every}; give one.",
            style="red",
        )
        return 2
    arguments.output.mkdir(parents=True, exist_ok=True)
    training = Training(settings, num_devices)
    device = f"{num_devices} x {jax.devices()[0].device_kind}"
    number = model.num_parameters(settings.sizes)
    console.print(
        f"{number / 1e6:.1f} million parameters, {settings.batch_size * settings.length} bytes of "
        f"text per step, on {device}"
    )
    begin = time.perf_counter()
    start = functools.partial(training.start, state=training.first_state(0))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        programs = list(pool.map(start, arguments.recipes))
    console.print(f"compiled in {time.perf_counter() - begin:.0f} s")
    runs = train(training, programs, device, arguments.output)
    report.plot(runs, device, arguments.output / "fp8_training.png")
    report.show(runs, console)
    differences = report.final_differences(runs)
    for name, (mean, error) in differences.items():
        between = f" (standard error {error:.2%})" if settings.seeds > 1 else ""
        console.print(f"{name}: {mean:+.2%} from bfloat16's held-out loss{between}")
    console.print(f"{arguments.output}/fp8_training.png is written.")
    if CLAIMED not in differences:
        return 0
    most = MOST_DIFFERENCE_OF_SMALL if arguments.small else MOST_DIFFERENCE
    holds = abs(differences[CLAIMED][0]) <= most  # NaN is not
    verdict = "within" if holds else "NOT within"
    console.print(f"{CLAIMED} ends {verdict} {most:.0%} of bfloat16")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
