"""Writes the small checkpoints of tests/data/checkpoints, with what torch computes from them.

  python3.11 -m venv hf
  hf/bin/pip install numpy==2.4.6 safetensors==0.8.0 torch==2.13.0 transformers==5.24.0
  hf/bin/python tools/hf_fixtures.py [FAMILY...]

Each folder is what `save_pretrained` writes. `gradients/` is one more checkpoint in the same
layout, with the gradients of sum(y * dy) by the MoE parameters. `block.safetensors` has x, y, dy
and dx of every MoE block, and for four families greedy tokens and the logits of a whole model.
torch computes in float32 on one thread, whatever dtype the files have. torch for CPUs exists for
Python 3.11.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "tests" / "data" / "checkpoints"
PROMPT, NEW, VOCABULARY = 8, 64, 128

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.5,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "intermediate_size": 40}
GROUPS = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
DENSE_FIRST = {"num_hidden_layers": 2}


@dataclasses.dataclass(frozen=True)
class Family:
    """A model of transformers and its config."""

    name: str
    config: dict[str, Any]
    block: Callable[[Any], Any] = lambda layer: layer.mlp
    vision: dict[str, Any] | None = None
    dtype: torch.dtype = torch.float32
    generate: bool = False
    original: bool = True


LLAMA4_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
    "vision_output_dim": 16,
    "projector_input_dim": 16,
    "projector_output_dim": 16,
}
LLAMA4 = {
    "intermediate_size": 24,
    "intermediate_size_mlp": 40,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "num_hidden_layers": 2,
}
KIMI_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 2,
    "pos_emb_height": 2,
    "pos_emb_width": 2,
    "pos_emb_time": 1,
}
QWEN = EXPERTS | {"num_experts": 6, "norm_topk_prob": True}
V3: dict[str, Any] = MLA | EXPERTS | GROUPS | DENSE_FIRST
V3 |= {"n_shared_experts": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True}

FAMILIES = {
    "mixtral": Family(
        "Mixtral",
        {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 24}
        | {"sliding_window": 16}
        | DENSE_FIRST,
        generate=True,
    ),
    "mixtral_stacked": Family(
        "Mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 16},
        dtype=torch.bfloat16,
        original=False,
    ),
    "qwen3_moe": Family("Qwen3Moe", QWEN | {"num_hidden_layers": 2}, generate=True),
    "olmoe": Family(
        "Olmoe",
        {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": 16,
            "norm_topk_prob": False,
            "num_key_value_heads": 4,
            "clip_qkv": 1.0,
        }
        | DENSE_FIRST,
        generate=True,
    ),
    "deepseek_v3": Family("DeepseekV3", V3, dtype=torch.bfloat16),
    "kimi_k25": Family(
        "Kimi_K25",
        V3
        | {"model_type": "deepseek_v3", "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
        | {"routed_scaling_factor": 2.827},
        vision=KIMI_VISION,
        dtype=torch.bfloat16,
    ),
    "qwen2_moe": Family(
        "Qwen2Moe",
        QWEN
        | {"shared_expert_intermediate_size": 16, "norm_topk_prob": False}
        | {"num_hidden_layers": 2, "mlp_only_layers": [0]},
        dtype=torch.bfloat16,
    ),
    "qwen3_next": Family(
        "Qwen3Next",
        QWEN
        | {
            "num_experts": 4,
            "shared_expert_intermediate_size": 16,
            "layer_types": ["full_attention"],
        },
    ),
    "deepseek_v2": Family(
        "DeepseekV2",
        MLA
        | EXPERTS
        | GROUPS
        | DENSE_FIRST
        | {
            "n_shared_experts": 2,
            "routed_scaling_factor": 16.0,
            "topk_method": "group_limited_greedy",
        },
    ),
    "glm4_moe": Family(
        "Glm4Moe",
        EXPERTS
        | GROUPS
        | DENSE_FIRST
        | {"n_shared_experts": 1, "routed_scaling_factor": 1.5, "n_group": 1, "topk_group": 1},
    ),
    "gpt_oss": Family(
        "GptOss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 24,
            "swiglu_limit": 1.0,
            "sliding_window": 16,
        }
        | DENSE_FIRST,
        generate=True,
    ),
    "gpt_oss_mxfp4": Family(
        "GptOss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32},
        dtype=torch.bfloat16,
    ),
    "llama4": Family(
        "Llama4",
        LLAMA4,
        block=lambda layer: layer.feed_forward,
        vision=LLAMA4_VISION,
        dtype=torch.bfloat16,
    ),
    "minimax_m2": Family(
        "MiniMaxM2", {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24}
    ),
}


def make(family: Family) -> Any:
    """Returns the model with random parameters, biases among them, rounded to the files' dtype."""
    torch.manual_seed(0)
    config_class = getattr(transformers, f"{family.name}Config")
    sizes = SIZES | ({"vocab_size": VOCABULARY} if family.generate else {})
    if family.vision is None:
        config = config_class(**sizes | family.config)
    else:
        config = config_class(text_config=sizes | family.config, vision_config=family.vision)
    kind = "ForCausalLM" if family.vision is None else "ForConditionalGeneration"
    for one in (config, config.get_text_config()):
        one._experts_implementation = "eager"
    model = getattr(transformers, family.name + kind)(config).float().eval()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "freq" in name or not tensor.is_floating_point():
            continue
        if "bias" in name or "experts" in name or "router" in name or name.endswith("gate.weight"):
            tensor.data.normal_(0, 0.3)
        if not is_float32(name):
            tensor.data.copy_(tensor.data.to(family.dtype).float())
    return model


def is_float32(name: str) -> bool:
    """Whether a file of bfloat16 tensors keeps this one in float32."""
    return name.endswith(("mlp.gate.weight", "e_score_correction_bias"))


def layers_of(model: Any) -> Any:
    """Returns the decoder layers."""
    text = getattr(model, "language_model", model).model
    return getattr(text, "language_model", text).layers


def values(tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Returns tensors in the dtypes of the files."""
    return {
        n: t.detach().clone() if is_float32(n) else t.detach().to(dtype) for n, t in tensors.items()
    }


def run_block(block: Any, seed: int) -> dict[str, torch.Tensor]:
    """Returns x, y, dy and dx of one MoE block, and leaves gradients in its parameters."""
    generator = torch.Generator().manual_seed(seed)
    x, dy = (torch.randn(2, 12, SIZES["hidden_size"], generator=generator) for _ in range(2))
    x.requires_grad_()
    y = block(x.clone())
    y = (y[0] if isinstance(y, tuple) else y).reshape(x.shape)
    (y * dy).sum().backward()
    return {"x": x.detach(), "y": y.detach(), "dy": dy, "dx": x.grad}


def generate(model: Any) -> dict[str, torch.Tensor]:
    """Returns greedy tokens after a prompt, and the logits at every position of both."""
    prompt = torch.randint(0, VOCABULARY, (2, PROMPT), generator=torch.Generator().manual_seed(9))
    tokens = prompt
    with torch.no_grad():
        for _ in range(NEW):
            tokens = torch.cat((tokens, model(tokens).logits[:, -1:].argmax(-1)), 1)
        return {"tokens": tokens.to(torch.int32), "logits": model(tokens).logits[:1].float()}


def pack(model: Any, family: Family) -> dict[str, torch.Tensor]:
    """Gives gpt-oss's experts values of MXFP4, and returns them packed, by name."""
    packed: dict[str, torch.Tensor] = {}
    rng = np.random.default_rng(0)
    for i, layer in enumerate(layers_of(model)):
        for name in ("gate_up_proj", "down_proj"):
            parameter = getattr(layer.mlp.experts, name)
            experts, contracted, outputs = parameter.shape
            blocks = torch.from_numpy(
                rng.integers(0, 256, (experts, outputs, contracted // 32, 16), np.uint8)
            )
            scales = torch.from_numpy(rng.integers(122, 127, blocks.shape[:3], np.uint8))
            parameter.data = convert_moe_packed_tensors(blocks, scales).float().contiguous()
            assert parameter.shape == (experts, contracted, outputs)
            full = f"model.layers.{i}.mlp.experts.{name}"
            packed |= {f"{full}_blocks": blocks, f"{full}_scales": scales}
    return packed


def write(key: str) -> None:
    """Writes the folder of one family."""
    family, folder = FAMILIES[key], FOLDER / key
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model = make(family)
    packed = pack(model, family) if key.endswith("mxfp4") else {}
    options: dict[str, Any] = {"save_original_format": family.original}
    if key == "mixtral":
        options["max_shard_size"] = "100KB"
    model.save_pretrained(folder, state_dict=values(model.state_dict(), family.dtype), **options)
    recorded: dict[str, torch.Tensor] = {}
    blocks = 0
    for i, layer in enumerate(layers_of(model)):
        block = family.block(layer)
        if not hasattr(block, "experts"):
            continue
        recorded |= {f"{name}.{i}": t.contiguous() for name, t in run_block(block, i).items()}
        blocks += 1
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    for name, buffer in model.named_buffers():
        if "correction_bias" in name:  # which has none
            gradients[name] = torch.zeros_like(buffer)
    (folder / "gradients").mkdir()
    model.save_pretrained(
        folder / "gradients", state_dict=gradients, save_original_format=family.original
    )
    if family.generate:
        recorded |= generate(model)
    save_file(recorded, folder / "block.safetensors")
    if packed:
        repack(folder, packed)
    if key == "kimi_k25":
        for parent in (folder, folder / "gradients"):
            name_as_published(parent)
    change_config(folder, {"dtype": str(family.dtype).removeprefix("torch.")})
    for parent in (folder, folder / "gradients"):
        (parent / "generation_config.json").unlink(missing_ok=True)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{key}: {blocks} blocks, {size} bytes")


def repack(folder: pathlib.Path, packed: dict[str, torch.Tensor]) -> None:
    """Replaces float experts in the file by packed ones, and says so in the config."""
    path = folder / "model.safetensors"
    dropped = {name.removesuffix("_blocks") for name in packed}
    kept = {name: t for name, t in load_file(path).items() if name not in dropped}
    save_file(kept | packed, path, metadata={"format": "pt"})
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    change_config(folder, {"quantization_config": quantization})


def name_as_published(folder: pathlib.Path) -> None:
    """Gives Kimi-K2.5 the names of its published files; save_pretrained writes others."""
    path = folder / "model.safetensors"
    saved, published = (f"language_model.model.{name}." for name in ("blocks", "layers"))
    tensors = {name.replace(saved, published): t for name, t in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    change_config(folder, {"architectures": ["KimiK25ForConditionalGeneration"]})


def change_config(folder: pathlib.Path, changes: dict[str, Any]) -> None:
    """Sets entries of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes, indent=2) + "\n")


def main() -> None:
    """Writes all folders, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", help="by default all")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    for key in parser.parse_args().families or FAMILIES:
        write(key)


if __name__ == "__main__":
    main()
