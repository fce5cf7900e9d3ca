"""Generates from a checkpoint of Hugging Face's: Mixtral, Qwen3-MoE, OLMoE or gpt-oss.

Each device decodes the same number of sequences, each in a slot of the KV cache. When a sequence
ends, its slot takes the next prompt; a slot without one has masked tokens, which no expert gets. A
prompt is text if the folder has a tokenizer.json and the package tokenizers is installed, otherwise
token ids.

    python examples/generate.py                              # a small random model
    python examples/generate.py DIR --prompt "Once upon"     # on all GPUs
    python examples/generate.py DIR --prompt "1 2" --prompt "3 4 5" --temperature 0.7 --top-p 0.9
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import pathlib
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from checkpoint_models.model import CheckpointModel, Params, load, make_mesh
from checkpoint_models.small import write_small
from checkpoint_models.text import Text
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

PROMPTS = ("1 2 3 4 5 6 7 8", "9 10 11", "12 13 14 15 16")  # for the small model


class Sampling(NamedTuple):
    """How the next token is chosen; with a temperature of 0, the likeliest."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __call__(self, logits: jax.Array, requests: jax.Array, positions: jax.Array) -> jax.Array:
        """[S, V] to int32[S]. What a request draws depends on no other, nor on its slot."""
        if self.temperature == 0:
            return logits.argmax(-1).astype(jnp.int32)
        root = jax.random.key(self.seed)

        def draw(logits: jax.Array, request: jax.Array, position: jax.Array) -> jax.Array:
            logits /= self.temperature
            if self.top_p < 1:
                ordered = jnp.sort(logits, descending=True)
                shares = jax.nn.softmax(ordered)
                count = (jnp.cumsum(shares) - shares < self.top_p).sum()
                logits = jnp.where(logits < ordered[count - 1], -jnp.inf, logits)
            key = jax.random.fold_in(jax.random.fold_in(root, request), position)
            return jax.random.categorical(key, logits).astype(jnp.int32)

        return jax.vmap(draw)(logits, requests, positions)


@dataclasses.dataclass
class Phase:
    """Counts what steps with prompts, or without, have taken so far."""

    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    compile_seconds: float = 0.0

    def __str__(self) -> str:
        rate = self.tokens / self.seconds if self.seconds else 0.0
        each = 1e3 * self.seconds / max(self.steps, 1)
        return (
            f"{self.tokens} tokens in {self.steps} steps of {each:.2f} ms, {rate:.0f} tokens/s "
            f"(and {self.compile_seconds:.1f} s to compile)"
        )


@dataclasses.dataclass
class _Sequence:
    """A prompt and what follows, of which so many tokens are in the cache; one at least is not."""

    request: int
    tokens: list[int]
    num_prompt: int
    num_cached: int = 0

    @property
    def num_pending(self) -> int:
        return len(self.tokens) - self.num_cached


class Generator:
    """Decodes prompts in slots of a KV cache.

    While all slots decode, one program runs, for a token of each. When prompts enter, another runs
    for up to `chunk` tokens of each, in which other slots go on decoding.
    """

    def __init__(
        self,
        model: CheckpointModel,
        params: Params,
        *,
        batch_size: int,
        length: int,
        chunk: int = 256,
        sampling: Sampling = Sampling(),  # noqa: B008
        stop: Sequence[int] = (),
    ):
        if batch_size % model.mesh.size:
            raise ValueError(
                f"a batch of {batch_size} sequences on {model.mesh.size} devices; expected a "
                "multiple of the devices."
            )
        self.prefill, self.decode, self.stop = Phase(), Phase(), stop
        self.programs: dict[int, Callable[..., Any]] = {}  # for so many tokens per slot
        self._model, self._params, self._sampling = model, params, sampling
        self._batch_size, self._length, self._chunk = batch_size, length, chunk
        self._cache = model.make_cache(params, batch_size, length)

    def __call__(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        """Returns the tokens that follow each prompt, at most so many, a stop token the last."""
        for prompt in prompts:
            if not 0 < len(prompt) <= self._length - max_new_tokens:
                raise ValueError(
                    f"a prompt of {len(prompt)} tokens, and {max_new_tokens} new ones; expected 1 "
                    f"or more, and with the new ones at most the length of {self._length}."
                )
        results: list[list[int]] = [[] for _ in prompts]
        waiting = collections.deque(_Sequence(i, [*p], len(p)) for i, p in enumerate(prompts))
        slots: dict[int, _Sequence] = {}
        while waiting or slots:
            free = [slot for slot in range(self._batch_size) if slot not in slots]
            slots |= {slot: waiting.popleft() for slot in free[: len(waiting)]}
            chosen = self._run(slots)
            for slot, sequence in list(slots.items()):
                if sequence.num_pending:  # more of the prompt
                    continue
                sequence.tokens.append(int(chosen[slot]))
                new = sequence.tokens[sequence.num_prompt :]
                if new[-1] in self.stop or len(new) == max_new_tokens:
                    results[sequence.request] = new
                    del slots[slot]
        return results

    def _run(self, slots: dict[int, _Sequence]) -> np.ndarray:
        """Caches pending tokens, and returns the token that follows them in each slot."""
        longest = max(sequence.num_pending for sequence in slots.values())
        width = min(1 << (longest - 1).bit_length(), self._chunk)
        tokens = np.zeros((self._batch_size, width), np.int32)
        positions = np.full_like(tokens, -1)  # which masks a token
        requests = np.zeros(self._batch_size, np.int32)
        for slot, sequence in slots.items():
            begin, end = sequence.num_cached, min(sequence.num_cached + width, len(sequence.tokens))
            tokens[slot, : end - begin] = sequence.tokens[begin:end]
            positions[slot, : end - begin] = np.arange(begin, end)
            requests[slot] = sequence.request
            sequence.num_cached = end
        phase = self.decode if width == 1 else self.prefill
        sharding = NamedSharding(self._model.mesh, P("expert"))
        inputs = jax.device_put((tokens, positions, requests), sharding)
        start = time.perf_counter()
        if width not in self.programs:
            step = jax.jit(self._step, donate_argnums=1)
            self.programs[width] = step.lower(self._params, self._cache, *inputs).compile()
            phase.compile_seconds += time.perf_counter() - start
            start = time.perf_counter()
        chosen, self._cache = self.programs[width](self._params, self._cache, *inputs)
        result = np.asarray(chosen)
        phase.seconds += time.perf_counter() - start
        phase.steps += 1
        phase.tokens += int((positions >= 0).sum())
        return result

    def _step(
        self, params: Params, cache: Any, tokens: jax.Array, positions: jax.Array, requests: Any
    ) -> tuple[jax.Array, Any]:
        x, cache, _ = self._model(params, tokens, positions, cache)
        last = positions.argmax(1)[:, None, None]
        x = jnp.take_along_axis(x, last, 1)[:, 0]
        logits = self._model.logits(params, x)
        return self._sampling(logits, requests, positions.max(1)), cache


def stop_tokens(folder: pathlib.Path) -> list[int]:
    """Returns the tokens that end a text, by the first file that has them."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        given = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
        if given is not None:
            return given if isinstance(given, list) else [given]
    return []


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("folder", nargs="?", type=pathlib.Path, help="a checkpoint; without one, a small model")
    add("--prompt", action="append", metavar="TEXT", help="give it again for more prompts")
    add("--max-new-tokens", type=int, default=64, metavar="N", help="per prompt (default 64)")
    add("--length", type=int, metavar="N", help="tokens per slot (default: what the prompts need)")
    add("--batch-size", type=int, metavar="N", help="sequences at a time (default 2 per device)")
    add(
        "--temperature",
        type=float,
        default=0.0,
        metavar="X",
        help="0 takes the likeliest (default)",
    )
    add("--top-p", type=float, default=1.0, metavar="X", help="the likeliest tokens of this share")
    add("--seed", type=int, default=0, metavar="N", help="of samples")
    add("--expert-parallel", type=int, metavar="N", help="devices (default: all)")
    return parser.parse_args()


def main() -> None:
    """Loads, generates, and says how fast."""
    arguments = parse_arguments()
    console = Console()
    mesh = make_mesh(arguments.expert_parallel)
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or write_small(pathlib.Path(temporary))
        model, params, _ = load(folder, mesh)
        text, stop = Text(folder), stop_tokens(folder)
    prompts = arguments.prompt or PROMPTS
    encoded = [text.encode(prompt) for prompt in prompts]
    generator = Generator(
        model,
        params,
        batch_size=arguments.batch_size or 2 * mesh.size,
        length=arguments.length or max(map(len, encoded)) + arguments.max_new_tokens,
        sampling=Sampling(arguments.temperature, arguments.top_p, arguments.seed),
        stop=stop,
    )
    results = generator(encoded, arguments.max_new_tokens)
    for prompt, result in zip(prompts, results, strict=True):
        console.print(f"{prompt} -> {text.decode(result)}", markup=False, highlight=False)
    console.print(f"{mesh.size} x {jax.devices()[0].device_kind}")
    console.print(f"prefill: {generator.prefill}")
    console.print(f"decode:  {generator.decode}")


if __name__ == "__main__":
    main()
