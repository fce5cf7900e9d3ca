"""Measures the memory that `jax_ep.checkpoints.load` takes on CPU devices.

  python tools/checkpoint_memory.py write FOLDER     writes weights of OLMoE-1B-7B's shapes, 14 GB
  python tools/checkpoint_memory.py measure FOLDER   loads them onto 8 devices, in 16 GB of memory

Prints the largest anonymous memory of the process while it loads, above what it has before and what
the arrays take. The exit status is 1 if that is more than twice the largest block of one device.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import struct
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
from rich.progress import track

HIDDEN, INTERMEDIATE, VOCABULARY, NUM_EXPERTS, NUM_LAYERS = 2048, 1024, 50304, 64, 16
CONFIG = {
    "architectures": ["OlmoeForCausalLM"],
    "model_type": "olmoe",
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": 8,
    "num_hidden_layers": NUM_LAYERS,
    "norm_topk_prob": False,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "vocab_size": VOCABULARY,
}
NUM_SHARDS = 4
NUM_DEVICES = 8
INTERVAL_S = 0.002
MIB = 2**20


def shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the names and shapes of all tensors, which are bfloat16."""
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}"
        for name in "input_layernorm", "post_attention_layernorm":
            yield f"{prefix}.{name}.weight", (HIDDEN,)
        for name in "q_norm", "k_norm":
            yield f"{prefix}.self_attn.{name}.weight", (HIDDEN,)
        for name in "q_proj", "k_proj", "v_proj", "o_proj":
            yield f"{prefix}.self_attn.{name}.weight", (HIDDEN, HIDDEN)
        yield f"{prefix}.mlp.gate.weight", (NUM_EXPERTS, HIDDEN)
        for expert in range(NUM_EXPERTS):
            of_expert = f"{prefix}.mlp.experts.{expert}"
            yield f"{of_expert}.gate_proj.weight", (INTERMEDIATE, HIDDEN)
            yield f"{of_expert}.up_proj.weight", (INTERMEDIATE, HIDDEN)
            yield f"{of_expert}.down_proj.weight", (HIDDEN, INTERMEDIATE)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCABULARY, HIDDEN)


def write(folder: pathlib.Path) -> None:
    """Writes config.json, the shards and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    everything = list(shapes())
    per_shard = -(-len(everything) // NUM_SHARDS)
    index, total = {}, 0
    for shard in track(range(NUM_SHARDS), "writing"):
        name = f"model-{shard + 1:05}-of-{NUM_SHARDS:05}.safetensors"
        header, end = {}, 0
        tensors = everything[shard * per_shard :][:per_shard]
        for tensor, shape in tensors:
            begin, end = end, end + 2 * int(np.prod(shape))
            header[tensor] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
            index[tensor] = name
        encoded = json.dumps(header).encode()
        rng = np.random.default_rng(shard)
        with (folder / name).open("wb") as file:
            file.write(struct.pack("<Q", len(encoded)) + encoded)
            for _, shape in tensors:
                # bfloat16 of either sign between 2^-6 and 2^-4: random, and never NaN
                bits = rng.integers(0, 2**16, int(np.prod(shape)), np.uint16)
                file.write(((bits & 0x80FF) | 0x3C80).tobytes())
        total += end
    metadata = {"metadata": {"total_size": total}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(metadata))


def anonymous_bytes() -> int:
    """Returns what the process holds in memory that is no file's."""
    status = pathlib.Path("/proc/self/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    assert found is not None
    return 1024 * int(found[1])


class Watch:
    """Samples the process's anonymous memory in a thread, and keeps the largest."""

    def __init__(self) -> None:
        self.largest = 0
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_done.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_done.wait(INTERVAL_S):
            self.largest = max(self.largest, anonymous_bytes())


def measure(folder: pathlib.Path) -> int:
    """Loads the checkpoint, and compares the memory that this takes with that of the arrays."""
    import jax

    import jax_ep
    from jax_ep import checkpoints

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    mesh = jax_ep.make_mesh((NUM_DEVICES,), ("expert",))
    spec = jax.sharding.PartitionSpec("expert")
    jax.block_until_ready(jax.device_put(np.ones(NUM_DEVICES), jax.NamedSharding(mesh, spec)))
    before, start = anonymous_bytes(), time.perf_counter()
    with Watch() as watch:
        loaded = checkpoints.load(folder, mesh=mesh, other=lambda name, shape: spec, progress=True)
        arrays = jax.block_until_ready(jax.tree.leaves((loaded.layers, loaded.other)))
    seconds = time.perf_counter() - start
    blocks = [shard.data.nbytes for array in arrays for shard in array.addressable_shards]
    beyond = watch.largest - before - sum(blocks)
    read = f"{loaded.bytes_read / 1e9:.2f} GB read"
    print(f"{sum(blocks) / 1e9:.2f} GB of arrays in {seconds:.0f} s, {read}")
    print(f"largest block of a device: {max(blocks) / MIB:.0f} MiB")
    print(f"largest anonymous memory beyond the arrays: {beyond / MIB:.0f} MiB")
    return int(beyond > 2 * max(blocks))


def main() -> int:
    """Runs the command that is given."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("write", "measure"))
    parser.add_argument("folder", type=pathlib.Path)
    arguments = parser.parse_args()
    if arguments.command == "measure":
        return measure(arguments.folder)
    write(arguments.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
