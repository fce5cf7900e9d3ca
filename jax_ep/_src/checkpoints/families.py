"""The table of families: names and layouts of the tensors, layers with experts, and routing."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

from jax_ep._src.checkpoints.config import entry
from jax_ep._src.core.errors import ArgumentError
from jax_ep._src.matmul.activations import ClampedSwiGlu
from jax_ep._src.routing.routers import sigmoid_topk, softmax_topk

Config = Mapping[str, Any]
Options = dict[str, Any]
Layout = Literal["each", "stacked", "interleaved", "halves"]


@dataclasses.dataclass(frozen=True)
class Family:
    """How one family's checkpoints are read.

    Attributes:
      routing: from the config to options of the layer, beside its sizes.
      has_experts: whether layer i has experts.
      size: the config's names of F.
      block: the module of the experts, below "layers.{i}.".
      stacked_block: the same in files with stacked experts.
      projections: the names of gate, up and down of one expert.
      layout: "each" for a tensor per expert and projection, [out, in]; "stacked" for gate_up_proj
        [E, 2F, H] and down_proj [E, H, F]; "interleaved" and "halves" for gate_up_proj [E, H, 2F]
        and down_proj [E, F, H].
      router: the router's matrix [E, H], below the block.
      logits_bias: the bias of logits, or None.
      selection_bias: the bias of the selection, or None.
      shared: the module of the shared expert, or None.
      shared_gate: its gate [1, H], or None.
      layers: the prefix of all layers' names.
    """

    routing: Callable[[Config], Options]
    has_experts: Callable[[Config, int], bool] = lambda config, i: True
    size: tuple[str, ...] = ("moe_intermediate_size",)
    block: str = "mlp"
    stacked_block: str = "mlp"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    layout: Layout = "each"
    router: str = "gate.weight"
    logits_bias: str | None = None
    selection_bias: str | None = None
    shared: str | None = None
    shared_gate: str | None = None
    layers: str = "model.layers"


# ---- routing


def _always_normalized(config: Config) -> Options:
    return {}


def _softmax(normalized: bool) -> Callable[[Config], Options]:
    """Makes the routing of a family that normalizes, or not, if its config does not say."""

    def routing(config: Config) -> Options:
        if config.get("norm_topk_prob", normalized):
            return {}
        return {"router": functools.partial(softmax_topk, renormalize=False)}

    return routing


def _gated_shared_expert(normalized: bool) -> Callable[[Config], Options]:
    def routing(config: Config) -> Options:
        shared = {"shared_intermediate_size": entry(config, "shared_expert_intermediate_size")}
        return _softmax(normalized)(config) | shared | {"shared_gate": True}

    return routing


def _shared_experts(config: Config) -> Options:
    count = config.get("n_shared_experts")
    return {"shared_intermediate_size": count * config["moe_intermediate_size"]} if count else {}


def _groups(config: Config) -> Options:
    groups = {"num_groups": config.get("n_group"), "top_groups": config.get("topk_group")}
    return {name: value for name, value in groups.items() if value is not None}


def _deepseek_v2(config: Config) -> Options:
    method = config.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise ArgumentError(
            f"jax_ep.checkpoints: topk_method={method!r} in the config; expected 'greedy' or "
            "'group_limited_greedy'. Give moe_options' result a router= of your own."
        )
    groups = _groups(config) | {"group_score": "max"} if method != "greedy" else {}
    scale = float(config.get("routed_scaling_factor", 1.0))
    router = functools.partial(softmax_topk, renormalize=False, scale=scale, **groups)
    return {"router": router} | _shared_experts(config)


def _deepseek_v3(config: Config) -> Options:
    router = functools.partial(
        sigmoid_topk,
        renormalize=bool(config.get("norm_topk_prob", True)),
        scale=float(config.get("routed_scaling_factor", 1.0)),
        **_groups(config),
    )
    return {"router": router, "selection_bias": True} | _shared_experts(config)


def _minimax_m2(config: Config) -> Options:
    return {"router": "sigmoid", "selection_bias": True}


def _gpt_oss(config: Config) -> Options:
    activation = ClampedSwiGlu(
        limit=config.get("swiglu_limit", 7.0), alpha=config.get("swiglu_alpha", 1.702)
    )
    return {"activation": activation, "use_bias": True, "logits_bias": True}


def _llama4(config: Config) -> Options:
    return {
        "router": functools.partial(sigmoid_topk, renormalize=False),
        "weights_on_input": True,
        "shared_intermediate_size": entry(config, "intermediate_size"),
    }


# ---- layers with experts


def _sparse_step(config: Config, i: int) -> bool:
    step = config.get("decoder_sparse_step") or 1
    return i not in (config.get("mlp_only_layers") or ()) and (i + 1) % step == 0


def _after_dense(config: Config, i: int) -> bool:
    step = config.get("moe_layer_freq") or 1
    return i >= (config.get("first_k_dense_replace") or 0) and i % step == 0


def _listed(config: Config, i: int) -> bool:
    listed = config.get("moe_layers")
    step = config.get("interleave_moe_layer_step") or 1
    return i in listed if listed is not None else (i + 1) % step == 0


# ---- the table

_QWEN = Family(_softmax(False), _sparse_step)
_QWEN_SHARED: dict[str, Any] = {
    "shared": "shared_expert",
    "shared_gate": "shared_expert_gate.weight",
}
_MIXTRAL = Family(
    _always_normalized,
    size=("intermediate_size",),
    block="block_sparse_moe",
    projections=("w1", "w3", "w2"),
)
_DEEPSEEK_V2 = Family(_deepseek_v2, _after_dense, shared="shared_experts")
_DEEPSEEK_V3 = dataclasses.replace(
    _DEEPSEEK_V2, routing=_deepseek_v3, selection_bias="gate.e_score_correction_bias"
)
_LLAMA4 = Family(
    _llama4,
    _listed,
    size=("intermediate_size",),
    block="feed_forward",
    layout="halves",
    router="router.weight",
    shared="shared_expert",
)

FAMILIES: dict[str, Family] = {
    "MixtralForCausalLM": _MIXTRAL,
    "Qwen3MoeForCausalLM": _QWEN,
    "OlmoeForCausalLM": Family(_softmax(False), size=("intermediate_size",)),
    "DeepseekV3ForCausalLM": _DEEPSEEK_V3,
    "KimiK25ForConditionalGeneration": dataclasses.replace(
        _DEEPSEEK_V3, layers="language_model.model.layers"
    ),
    "Qwen2MoeForCausalLM": dataclasses.replace(
        _QWEN, routing=_gated_shared_expert(False), **_QWEN_SHARED
    ),
    "Qwen3NextForCausalLM": dataclasses.replace(
        _QWEN, routing=_gated_shared_expert(True), **_QWEN_SHARED
    ),
    "DeepseekV2ForCausalLM": _DEEPSEEK_V2,
    "Glm4MoeForCausalLM": _DEEPSEEK_V3,
    "GptOssForCausalLM": Family(
        _gpt_oss,
        size=("intermediate_size",),
        layout="interleaved",
        router="router.weight",
        logits_bias="router.bias",
    ),
    "Llama4ForCausalLM": _LLAMA4,
    "Llama4ForConditionalGeneration": dataclasses.replace(
        _LLAMA4, layers="language_model.model.layers"
    ),
    "MiniMaxM2ForCausalLM": dataclasses.replace(
        _MIXTRAL, routing=_minimax_m2, selection_bias="e_score_correction_bias"
    ),
}
"""By the entry of a config's ``architectures``."""
