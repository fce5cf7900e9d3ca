"""Compares layers of jax_ep on a GPU with blocks of transformers, from the same checkpoint.

  python -P tools/torch_parity.py [FAMILY...]

torch writes a checkpoint of one layer at a published model's sizes, in bfloat16, and computes a
block's result and gradients from it, in bfloat16 and in float32. jax_ep loads the folder and
computes the same in bfloat16. The tables have the norms of errors, relative to those of float32.
The exit status is 1 if one of jax_ep's is over 1.1 times torch's. Needs torch and transformers 5.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys
import tempfile
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs memory, too

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax import nnx
from rich.console import Console
from rich.table import Table

import jax_ep.nnx
from jax_ep import checkpoints

TOKENS = 2048
LARGEST_RATIO = 1.1
COMMON = {
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "olmoe": (
        "Olmoe",
        {"hidden_size": 2048, "intermediate_size": 1024, "num_experts": 64}
        | {"num_experts_per_tok": 8, "norm_topk_prob": False},
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128}
        | {"num_experts_per_tok": 8, "norm_topk_prob": True},
    ),
    "mixtral": (
        "Mixtral",
        {"hidden_size": 4096, "intermediate_size": 14336, "num_local_experts": 8}
        | {"num_experts_per_tok": 2},
    ),
    "gpt_oss": (
        "GptOss",
        {"hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 32}
        | {"num_experts_per_tok": 4, "head_dim": 64},
    ),
    "deepseek_v3": (  # a quarter of its experts
        "DeepseekV3",
        {"hidden_size": 7168, "moe_intermediate_size": 2048, "n_routed_experts": 64}
        | {"num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "n_shared_experts": 1}
        | {"first_k_dense_replace": 0, "routed_scaling_factor": 2.5, "norm_topk_prob": True},
    ),
}


@dataclasses.dataclass
class Results:
    """The output of a block, and gradients by the layer's names for parameters."""

    y: np.ndarray
    dx: np.ndarray
    gradients: dict[str, np.ndarray]

    def errors(self, exact: Results) -> dict[str, float]:
        """Returns the norms of the differences over those of the exact results."""
        named = {"y": (self.y, exact.y), "dx": (self.dx, exact.dx)}
        named |= {n: (g, exact.gradients[n]) for n, g in self.gradients.items()}
        return {n: _norm(a - b) / _norm(b) for n, (a, b) in named.items() if _norm(b)}


def _norm(array: np.ndarray) -> float:
    return float(np.linalg.norm(array.astype(np.float64).ravel()))


def make_model(name: str, config: dict[str, Any]) -> Any:
    """Returns a model on the GPU whose parameters are random, and are in bfloat16."""
    torch.manual_seed(0)
    made = getattr(transformers, f"{name}Config")(**COMMON | config)
    made._experts_implementation = "eager"
    with torch.device("cuda"):
        model = getattr(transformers, f"{name}ForCausalLM")(made)
    for parameter_name, tensor in model.named_parameters():
        if "experts" in parameter_name or "router" in parameter_name or "gate" in parameter_name:
            tensor.data.normal_(0, 0.02)
    return model.bfloat16()


def run_torch(model: Any, x: np.ndarray, dy: np.ndarray, folder: pathlib.Path) -> tuple[Any, Any]:
    """Returns y and dx of the model's block, and writes the parameters' gradients to the folder."""
    block = model.model.layers[0].mlp
    parameter = next(block.parameters())
    given, cotangent = (torch.from_numpy(a).to(parameter) for a in (x, dy))
    given.requires_grad_()
    y = block(given.clone())
    y = (y[0] if isinstance(y, tuple) else y).reshape(given.shape)
    (y.float() * cotangent.float()).sum().backward()
    gradients = {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}
    gradients |= {n: torch.zeros_like(b) for n, b in model.named_buffers() if "correction" in n}
    model.save_pretrained(folder, state_dict=gradients)
    model.zero_grad()
    return y.detach().float().cpu().numpy(), given.grad.float().cpu().numpy()


def load(folder: pathlib.Path, mesh: Any, dtype: Any) -> Any:
    """Returns the parameters of the layer in a folder."""
    loaded = checkpoints.load(folder, mesh=mesh, dtype=dtype, other=lambda name, shape: None)
    return loaded.layers[0]


def run_ours(folder: pathlib.Path, mesh: Any, x: np.ndarray, dy: np.ndarray) -> Results:
    """Returns the results of jax_ep's layer, loaded from a folder."""
    options = checkpoints.moe_options(folder)
    options |= {"param_dtype": jnp.bfloat16, "dtype": jnp.bfloat16, "mesh": mesh}
    made = nnx.eval_shape(lambda: jax_ep.nnx.MoE(**options, rngs=nnx.Rngs(0)), graph=True)

    @jax.jit
    def run(params: Any, x: jax.Array, dy: jax.Array) -> Any:
        def apply(params: Any, x: jax.Array) -> jax.Array:
            layer = nnx.clone(made)
            nnx.update(layer, params)
            y: jax.Array = layer(x)[0]
            return y

        y, pull = jax.vjp(apply, params, x)
        return y, *pull(dy)

    operands = (jnp.asarray(a, jnp.bfloat16) for a in (x, dy))
    y, gradients, dx = run(load(folder, mesh, jnp.bfloat16), *operands)
    floats = {n: np.asarray(g, np.float32) for n, g in gradients.items()}
    floats.pop("selection_bias", None)
    return Results(np.asarray(y, np.float32), np.asarray(dx, np.float32), floats)


def compare(key: str, console: Console) -> bool:
    """Prints a table of a family. Returns whether jax_ep's errors are no larger than torch's."""
    name, config = FAMILIES[key]
    mesh = jax_ep.make_mesh((1,), ("expert",), devices=jax.devices()[:1])
    rng = np.random.default_rng(0)
    x, dy = rng.standard_normal((2, 1, TOKENS, config["hidden_size"]), np.float32)
    x, dy = (np.asarray(jnp.asarray(a, jnp.bfloat16), np.float32) for a in (x, dy))
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        model = make_model(name, config)
        model.save_pretrained(folder)
        by_torch = []
        for kind in ("bfloat16", "float32"):
            y, dx = run_torch(model, x, dy, folder / kind)
            gradients = load(folder / kind, mesh, jnp.float32)
            floats = {n: np.asarray(g) for n, g in gradients.items()}
            by_torch.append(Results(y, dx, floats))
            model = model.float()
        del model
        torch.cuda.empty_cache()
        ours = run_ours(folder, mesh, x, dy)
    rounded, exact = by_torch
    errors, theirs = ours.errors(exact), rounded.errors(exact)
    table = Table("of", "jax_ep", "torch in bfloat16", title=f"{name}: errors")
    for quantity, error in errors.items():
        table.add_row(quantity, f"{error:.2e}", f"{theirs[quantity]:.2e}")
    console.print(table)
    return all(error <= LARGEST_RATIO * theirs[n] for n, error in errors.items())


def main() -> int:
    """Compares the families that are named, or all."""
    torch.backends.cuda.matmul.allow_tf32 = False
    console = Console(width=100)
    console.print(
        f"Errors relative to float32, {TOKENS} tokens, {torch.cuda.get_device_name()}, torch "
        f"{torch.__version__}, transformers {transformers.__version__}"
    )
    fine = [compare(key, console) for key in sys.argv[1:] or FAMILIES]
    return 0 if all(fine) else 1


if __name__ == "__main__":
    sys.exit(main())
