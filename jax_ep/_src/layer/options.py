"""The options that `nnx.MoE` and `linen.MoE` share, and their documentation."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, cast

import jax
import jax.numpy as jnp
from jax.nn.initializers import Initializer
from jax.sharding import AbstractMesh, Mesh
from jax.typing import DTypeLike

from jax_ep._src.core.expert_axis import AxisName
from jax_ep._src.layer.pickling import with_devices, without_devices
from jax_ep._src.matmul.activations import Activation
from jax_ep._src.moe.params import Remat
from jax_ep._src.moe.users_experts import ExpertsFunction
from jax_ep._src.quant.recipe import Recipe, WeightsOnly

LogicalAxes = Mapping[str, str | None]
"""Names of "experts", "hidden" and "intermediate" in Flax's logical partitioning, in linen only."""


def lecun_normal(
    key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32, out_sharding: Any = None
) -> jax.Array:
    """Draws as `jax.nn.initializers.lecun_normal`, whose function cannot be pickled."""
    return jax.nn.initializers.lecun_normal()(key, shape, dtype, out_sharding)


@dataclasses.dataclass(unsafe_hash=True)  # frozen, it would be no base of linen's modules
class Options:
    """The options of a layer, apart from its router.

    Args:
      hidden_size: H, the size of a token.
      intermediate_size: F, the inner size of an expert.
      num_experts: E. If E does not divide over the expert axis, the experts' parameters are padded;
        see `MoE`.
      top_k: K, the experts per token.
      num_identity_experts: Z, experts that return their input and are never sent tokens. They make
        the router wider than E: their ids are those from E on, and its biases, probabilities and
        loads are of E + Z experts.
      latent_size: the size of the experts' input and output, if it is not H. The layer projects
        tokens to it before they are sent, and the experts' sums back to H. Router, shared and
        identity experts keep H.
      mesh: the mesh to run on; None takes it from the context or the shardings, see `MoE`.
      expert_axis: the mesh axis, or axes, over which the experts are sharded. None keeps all
        experts on every rank.
      batch_axes: the mesh axes over which the leading dimension of x is sharded. The expert axis
        and `fsdp_axis` count among them, unless they are among `sequence_axes`. None takes every
        axis of the mesh that no other option names, except one that `jax.vmap` maps over
        (``spmd_axis_name``) and, inside a `shard_map`, manual ones other than ``"data"`` and
        ``"expert"``. If a tuple leaves out an axis, the ranks along it repeat each other's work;
        the layer warns if x is known to be sharded over it.
      sequence_axes: the mesh axes over which the second dimension of x is sharded, if it has one
        before H.
      fsdp_axis: the mesh axis over which H of the weights is sharded as well. The weights are
        gathered for use, and their gradients reduce-scattered.
      tensor_axis: the mesh axis over which F is sharded. Tokens are replicated over it, and the
        experts' outputs summed.
      logits_bias: adds a param to the logits (gpt-oss).
      selection_bias: adds a variable to the scores, but only for the selection (DeepSeek-V3); the
        router gets it as ``bias=``. Update it between steps with `routing.updated_bias`.
      activation: as in `moe_mlp`. A function of one array counts as plain, a function of (gate, up)
        as gated. A `functools.partial` may hold arrays, as may `experts_fn`, on meshes of Explicit
        axes too, where JAX lets no function close over them.
      use_bias: adds biases to both matmuls of each expert (gpt-oss).
      shared_intermediate_size: the F of a shared expert, which every token goes through
        (DeepSeek-V3). Give several shared experts as one of their summed size.
      shared_gate: adds a param by which the shared expert's output is gated (Qwen2-MoE): it is
        multiplied by ``sigmoid(x @ shared_gate)``.
      weights_on_input: multiplies the experts' input by the routing weights instead of their output
        (Llama-4), as in `moe_mlp`.
      record_ids: adds the selected experts to the statistics, as `MoEStats.topk_ids`. A later call
        that gets them as ``topk_ids=`` routes by them.
      experts_fn: computes the experts, as in `moe_mlp`. A call's ``adapters=`` are the fifth
        argument.
      local_only: does not shard tokens over the expert axis. Each rank computes its own experts on
        all tokens, and the layer sums over the axis, which suits few tokens.
      capacity_factor: lets a rank receive this multiple of its even share, as in `dispatch`. None
        drops nothing if each token's experts are distinct.
      num_chunks: as in `moe_mlp`; tokens are padded to a multiple of it.
      remat: as in `moe_mlp`.
      quantization: as in `moe_mlp`.
      quantized_only: makes a layer without w_up and w_down, whose calls all take quantized_weights:
        for inference from a checkpoint in eight or four bits.
      nvlink_domain_size: as in `moe_mlp`. None takes the ranks that each host of the mesh has, if
        the devices of the mesh are known.
      overlap: as in `moe_mlp`.
      num_comm_sms: the most SMs that each transfer uses on CUDA; None chooses.
      implementation: ``"cuda"``, ``"xla"``, or None to choose by platform, dtype and shapes.
      dtype: the dtype that experts compute in and return; None takes x's. Routing is float32.
      param_dtype: the dtype of the parameters. float32 weights stay float32 if `dtype` is narrower,
        so that their gradients are float32 as well.
      kernel_init: initializes each matrix [in, out] separately: the router's, and those of each
        expert and of the shared one, with gate and up apart.
      bias_init: initializes the biases.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    _: dataclasses.KW_ONLY
    num_identity_experts: int = 0
    latent_size: int | None = None
    mesh: Mesh | AbstractMesh | None = None
    expert_axis: AxisName | None = "expert"
    batch_axes: tuple[str, ...] | None = None
    sequence_axes: tuple[str, ...] = ()
    fsdp_axis: str | None = None
    tensor_axis: str | None = None
    logits_bias: bool = False
    selection_bias: bool = False
    activation: Activation = "swiglu"
    use_bias: bool = False
    shared_intermediate_size: int | None = None
    shared_gate: bool = False
    weights_on_input: bool = False
    record_ids: bool = False
    experts_fn: ExpertsFunction | None = None
    local_only: bool = False
    capacity_factor: float | None = None
    num_chunks: int = 1
    remat: Remat = "dispatch"
    quantization: Recipe | WeightsOnly | None = None
    quantized_only: bool = False
    nvlink_domain_size: int | None = None
    overlap: bool | None = None
    num_comm_sms: int | None = None
    implementation: str | None = None
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    kernel_init: Initializer = lecun_normal
    bias_init: Initializer = jax.nn.initializers.zeros

    def __getstate__(self) -> dict[str, Any]:
        return without_devices(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(with_devices(state))


def options_of(given: Options) -> dict[str, Any]:
    """The options of a dataclass that has others beside them."""
    return {field.name: getattr(given, field.name) for field in dataclasses.fields(Options)}


def takes[**Arguments](
    fields: Callable[Arguments, Options],
) -> Callable[[Callable[[Any, Any], None]], Callable[Concatenate[Any, Arguments], None]]:
    """Gives a constructor the arguments of a dataclass, an instance of which it gets.

    Its docstring has the documentation of `Options` where it says "Args:".
    """

    def decorate(init: Callable[[Any, Any], None]) -> Callable[Concatenate[Any, Arguments], None]:
        @functools.wraps(init)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            init(self, fields(*args, **kwargs))

        shown = cast(Any, __init__)
        signature = inspect.signature(fields)
        self = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        shown.__signature__ = signature.replace(
            parameters=[self, *signature.parameters.values()], return_annotation=None
        )
        before, args, after = str(inspect.getdoc(init)).partition("Args:\n")
        shown.__doc__ = f"{before}{args}{str(inspect.getdoc(Options)).partition(args)[2]}\n{after}"
        # Python names the function where an argument is missing or unknown.
        fields.__init__.__qualname__ = init.__qualname__
        return shown

    return decorate
