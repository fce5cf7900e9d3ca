"""Chooses the tests that run and how they run: on 8 CPU devices, or on 1, 2 or 4 GPUs.

JAX_EP_TEST_TIER is "cpu" (the default) or "gpu<number>". On a GPU tier every operation must run its kernels, and no test
is skipped: tests that make no sense there are not collected. Import this before jax, which reads the environment that it sets.
"""

from __future__ import annotations

import fnmatch
import functools
import importlib.metadata
import os
import pathlib
import platform
import re
from collections.abc import Callable
from typing import Any

NAME = os.environ.get("JAX_EP_TEST_TIER", "cpu")
ON_GPU = NAME != "cpu"
NUM_GPUS = int(NAME.removeprefix("gpu")) if ON_GPU else 0
FOLDER = pathlib.Path(__file__).resolve().parents[1]

# Suites of the CPU tier that run on GPUs as well. Suites in tests/gpu_only/ run on GPUs only.
ON_BOTH = (
    "combine", "dispatch", "doctor", "domains", "export", "gradients", "grouped_matmul", "grouped_matmul_activation",
    "grouped_matmul_mxfp4", "grouped_matmul_quantized", "grouped_matmul_quantized_activation", "grouped_matmul_recipe",
    "grouped_matmul_rhs_gradient", "grouped_mlp", "in_flight", "layer_stack", "meshes", "moe_mlp", "moe_mlp_gradients",
    "moe_mlp_in_flight", "moe_mlp_parts", "quantized_dispatch",
    "quantized_mlp", "quantized_modules", "quantized_weight_gradients", "nnx", "nnx_options", "nnx_tokens", "padded_experts",
    "parity", "plan", "property", "quant", "quantize_both", "quantize_weights", "reference", "transformations", "weights_only",
)  # fmt: skip

# Suites of the CPU tier alone, each with the reason. A suite that neither list has is an error.
ON_CPU_ONLY = {
    "checkpoints/*": "reads files on the host, and runs layers that other suites test",
    "lowering/*": "lower programs for CUDA on a machine without a GPU",
    "processes/*": "several processes on CPU devices; tests/gpu_only/ has those of GPUs",
    "runtime/*": "names, messages and checks of the host",
    "tools/*": "tools, benchmarks, examples and documents",
    "operations/blocked_scales_test.py": "plain JAX",
    "operations/adapters_test.py": "experts_fn is moe_mlp_parts_test.py's; adapters are one more argument",
    "operations/latent_experts_test.py": "plain JAX around moe_mlp",
    "operations/linen_test.py": "the layer of nnx_test.py in other words",
    "operations/logical_axes_test.py": "shardings that Flax translates",
    "operations/memory_test.py": "sizes that follow from shapes",
    "operations/microscaling_test.py": "formats without kernels",
    "operations/module_functions_test.py": "compilations of eager calls",
    "operations/module_stack_test.py": "modules on top of layer_stack_test.py",
    "operations/moe_layer_errors_test.py": "messages",
    "operations/nnx_mesh_test.py": "how a layer finds its mesh while it is traced",
    "operations/nnx_router_test.py": "routers are plain JAX",
    "operations/noisy_router_test.py": "routers are plain JAX",
    "operations/numpy_moe_test.py": "the oracle is numpy",
    "operations/nvfp4_test.py": "a format that no kernel computes",
    "operations/quantized_checkpoint_test.py": "layers on top of quantized_mlp_test.py and quantized_modules_test.py",
    "operations/quant_formats_test.py": "properties of formats, and one without kernels; quant_test.py has the others",
    "operations/tuning_test.py": "files, and programs lowered without a GPU; tests/gpu_only/ measures",
    "operations/routing_test.py": "routers are plain JAX",
    "operations/routing_exact_test.py": "routers are plain JAX",
    "operations/replay_test.py": "routers are plain JAX",
    "operations/row_weights_test.py": "messages",
    "transformations/settings_test.py": "settings of JAX for the pure-JAX implementation",
    "transformations/vmap_sharded_test.py": "meshes of two axes, on 8 devices",
    "transformations/vmap_chains_test.py": "batching rules, on top of transformations_test.py",
}

# Tests that `make test` leaves to `make slow_test`. Each is a pattern of names, FILE::CLASS::TEST without the number of a
# case, and the number of cases that `make test` runs all the same.
SLOW = {
    "checkpoints/finetune_test.py::CommandTest::*": 0,
    "checkpoints/finetune_test.py::*::test_goes_on_*": 1,
    "checkpoints/finetune_test.py::*::test_the_tuned_*": 1,
    "checkpoints/generate_test.py::*::test_greedy_tokens": 1,
    "checkpoints/generate_test.py::*::test_teacher_forced_logits": 2,
    "checkpoints/generate_test.py::*::test_each_prompt_*": 1,
    "checkpoints/parity_test.py::*::test_nnx": 5,
    "lowering/export_test.py::AheadOfTimeTest::*": 0,
    "lowering/stack_lowering_test.py::ProgramTest::test_nothing_else_*": 0,
    "lowering/mlp_lowering_test.py::MoeMlpTest::test_chunks_*": 4,
    "operations/*::*Gradient*::*": 1,
    "operations/adapters_test.py::*::test_modules": 1,
    "operations/*::test_every_kind_of_*": 2,
    "operations/combine_test.py::*": 3,
    "operations/dispatch_test.py::CapacityTest::*": 3,
    "operations/domains_test.py::LayerTest::test_moe_mlp": 1,
    "operations/domains_test.py::MeshesTest::test_of_two_axes": 1,
    "operations/domains_test.py::BitwiseTest::test_drops_*": 1,
    "operations/domains_test.py::PropertyTest::*": 0,
    "operations/grouped_matmul_activation_test.py::*::test_tiles": 4,
    "operations/grouped_matmul_activation_test.py::*::test_master_*": 1,
    "operations/grouped_matmul_activation_test.py::*::test_other_shapes": 2,
    "operations/grouped_matmul_quantized_activation_test.py::*::test_agrees_with_numpy": 5,
    "operations/grouped_matmul_rhs_gradient_test.py::*::test_tiles": 2,
    "operations/grouped_matmul_test.py::ValuesTest::*": 3,
    "operations/grouped_mlp_test.py::*::test_agrees_with_the_named": 1,
    "operations/grouped_mlp_test.py::*::test_inside_shard_map": 1,
    "operations/grouped_mlp_test.py::PlacesTest::*": 0,
    "operations/moe_mlp_gradients_test.py::*::test_remat_*": 0,
    "operations/moe_mlp_gradients_test.py::*::test_chunks_in_a_scan": 0,
    "operations/moe_mlp_test.py::*": 1,
    "operations/moe_mlp_parts_test.py::ReferenceTest::*": 0,
    "operations/quantized_mlp_test.py::*::test_cotangents_that_*": 0,
    "operations/quantized_mlp_test.py::*::test_rows_that_are_sent_*": 0,
    "operations/quantized_mlp_test.py::*": 1,
    "operations/quantized_weight_gradients_test.py::*": 2,
    "operations/quantize_both_test.py::*": 2,
    "operations/weights_only_test.py::*": 2,
    "operations/grouped_matmul_mxfp4_test.py::*": 2,
    "operations/nvfp4_test.py::*": 2,
    "operations/in_flight_test.py::*": 2,
    "operations/moe_mlp_in_flight_test.py::*": 1,
    "operations/quantized_modules_test.py::ModulesTest::*": 0,
    "operations/quantized_modules_test.py::ShardedModulesTest::*": 0,
    "operations/quant_test.py::QuantizeTest::test_rows": 5,
    "operations/quantize_weights_test.py::*::test_against_numpy": 2,
    "operations/latent_experts_test.py::DenseTest::*": 1,
    "operations/layer_stack_test.py::*": 1,
    "operations/tuning_test.py::*::test_times_*": 1,
    "operations/memory_test.py::ResidualsTest::test_are_*": 3,
    "operations/microscaling_test.py::QuantizeTest::test_against_numpy": 6,
    "operations/module_functions_test.py::*": 1,
    "operations/module_stack_test.py::ShardingsTest::test_linen_boxes": 1,
    "operations/module_stack_test.py::NnxTest::*": 0,
    "operations/module_stack_test.py::LinenTest::*": 0,
    "operations/quantized_checkpoint_test.py::LayerTest::*": 0,
    "operations/grouped_matmul_recipe_test.py::*": 1,
    "operations/nnx_test.py::MeshTest::*": 1,
    "operations/nnx_test.py::OptionsTest::test_capacity": 1,
    "operations/nnx_*_test.py::*": 1,
    "operations/nnx_options_test.py::ChunksTest::*": 0,
    "operations/nnx_options_test.py::HalfPrecisionTest::*": 0,
    "operations/nnx_options_test.py::PaddingTest::test_explicit_axes": 0,
    "operations/nnx_options_test.py::SharedExpertTest::test_an_activation_*": 0,
    "operations/noisy_router_test.py::*": 1,
    "operations/replay_test.py::ModuleTest::test_routing_of_*": 1,
    "operations/padded_experts_test.py::*": 1,
    "operations/padded_experts_test.py::*::test_adamw": 0,
    "processes/layouts_test.py::DoctorTest::test_two_processes": 0,
    "processes/layouts_test.py::LayoutsTest::*": 0,
    "processes/programs_test.py::*": 0,
    "processes/two_hosts_test.py::*": 0,
    "runtime/pytrees_test.py::StateDictTest::test_whichever_*": 0,
    "tools/bench_layer_test.py::CommandTest::test_quick_*": 0,
    "tools/docs_test.py::FiguresTest::*": 0,
    "tools/bench_programs_test.py::*::test_all_calls_*": 1,
    "tools/bench_quantize_test.py::*::test_providers_*": 1,
    "tools/bench_quantize_test.py::*::test_one_custom_call_*": 2,
    "tools/bench_quantize_test.py::*::test_a_wrong_row_*": 1,
    "tools/bench_transfer_test.py::*::test_a_wrong_result_*": 1,
    "tools/bench_transfer_test.py::*::test_ours_is_checked": 2,
    "tools/bench_transfer_test.py::CommandTest::*": 0,
    "tools/mutation_test.py::*": 2,
    "tools/protocol_test.py::*::test_a_broken_protocol_fails": 0,
    "tools/protocol_test.py::*_holds_*three_ranks*": 0,
    "tools/protocol_test.py::*_calls": 0,
    "tools/protocol_test.py::*_holds_*at_once": 0,
    "tools/protocol_test.py::*_holds_*launched": 0,
    "tools/protocol_test.py::*_holds_*some_devices": 0,
    "tools/protocol_test.py::*_holds_*receive_rings*": 0,
    "tools/protocol_test.py::*_holds_different_calls_*": 0,
    "tools/protocol_test.py::*_holds_two_ranks": 0,
    "tools/protocol_test.py::*_holds_low_latency_*": 0,
    "tools/protocol_test.py::*_holds_network_of_three_domains_*": 0,
    "tools/protocol_test.py::*_holds_network_domain_*": 0,
    "tools/protocol_test.py::*_holds_network_with_rings_*": 0,
    "tools/olmoe_test.py::RunTest::*": 0,
    "tools/train_fp8_test.py::RunTest::*": 0,
    "tools/bench_layer_test.py::CommandTest::test_smoke": 0,
    "tools/bench_layer_test.py::LayersTest::test_same_results": 1,
    "tools/bench_layer_test.py::LayersTest::test_einsum": 0,
    "tools/bench_layer_test.py::LayersTest::test_quantized": 0,
    "tools/bench_layer_test.py::LayersTest::test_transformer_engine": 0,
    "tools/bench_layer_test.py::LayersTest::test_unspecified_rows": 0,
    "tools/bench_layer_test.py::PartsTest::*": 0,
    "tools/readme_test.py::*::test_block_runs": 1,
    "tools/tier_test.py::*::test_suites_of_gpus_*": 0,
    "tools/train_test.py::*::test_killed_and_resumed": 0,
    "tools/train_test.py::*::test_two_processes_*": 0,
    "transformations/settings_test.py::LeakTest::*": 0,
    "transformations/settings_test.py::NanTest::test_moe_mlp": 0,
    "transformations/transformations_test.py::VmapTest::test_of_shard_map_is_a_loop": 0,
    "transformations/vmap_chains_test.py::*": 0,
    "transformations/*": 1,
}

# The names of all tests, where a run has collected all.
all_tests: list[str] | None = None

# Where slow tests repeat quick ones with other parameters, train whole models, or check models of the protocol. CI runs a
# twentieth of these.
REPETITIONS = (
    "checkpoints/",
    "lowering/mlp_lowering_test",
    "operations/",
    "transformations/",
    "tools/olmoe_test",
    "tools/train_fp8_test",
    "tools/train_test",
    "tools/bench_layer_test.py::Layers",
    "tools/bench_programs_test",
    "tools/bench_quantize_test.py::Transfer",
    "tools/bench_transfer_test.py::Providers",
    "tools/mutation_test",
    "tools/protocol_test",
)

# Where slow tests start programs as users do. CI runs every other of these.
PROGRAMS = ("processes/", "tools/bench_", "tools/readme_test")


# Compilation takes most of a test's time on CPU devices, and LLVM most of that. jax_ep's own results do not depend on these
# settings; `fully_optimized` is for tests that do.
CPU_SETTINGS = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
if platform.machine() == "x86_64":
    CPU_SETTINGS["XLA_FLAGS"] = "--xla_cpu_max_isa=AVX2 --xla_cpu_parallel_codegen_split_count=1"

GPU_SETTINGS = {
    "JAX_EP_IMPLEMENTATION": "cuda",
    "JAX_PLATFORMS": "cuda,cpu",
    # layers are compared with dense results: float32 products, not TF32
    "JAX_DEFAULT_MATMUL_PRECISION": "highest",
    # several processes may share the GPUs
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    # NVLink multicast is not for test machines that others use
    "NCCL_NVLS_ENABLE": "0",
    # halves the time to compile; every process chooses the same algorithms
    "XLA_FLAGS": "--xla_gpu_autotune_level=0",
    # a hang is an error soon, but not while peers wait for one GPU to compile
    "JAX_EP_ENTRY_TIMEOUT_S": "100",
    "JAX_EP_PROGRESS_TIMEOUT_S": "30",
}


def suites() -> list[pathlib.Path]:
    """Returns the files of this tier. Raises if a suite does not say which tiers it belongs to."""
    on_gpu_only = sorted(FOLDER.glob("gpu_only/*_test.py"))
    on_cpu = sorted(set(FOLDER.glob("*/*_test.py")) - set(on_gpu_only))
    for path in on_cpu:
        name = path.relative_to(FOLDER).as_posix()
        patterns = [p for p in ON_CPU_ONLY if fnmatch.fnmatchcase(name, p)]
        if path.name.removesuffix("_test.py") not in ON_BOTH and not patterns:
            raise RuntimeError(
                f"tests/{name} belongs to no tier; expected its name in ON_BOTH of tests/helpers/tier.py, "
                "or in ON_CPU_ONLY with the reason why it does not run on GPUs"
            )
    if ON_GPU:
        names = {f"{name}_test.py" for name in ON_BOTH}
        return [path for path in on_cpu if path.name in names] + on_gpu_only
    return on_cpu


def _prepare() -> None:
    """Sets the environment of this tier."""
    for name, value in (GPU_SETTINGS if ON_GPU else CPU_SETTINGS).items():
        os.environ.setdefault(name, value)
    if not ON_GPU:
        return
    os.environ.pop("JAX_EP_TEST_DEVICES", None)
    if is_rehearsal():
        os.environ["JAX_NUM_CPU_DEVICES"] = str(NUM_GPUS)
        return
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = given.split(",") if given else [str(index) for index in range(NUM_GPUS)]
    if len(devices) < NUM_GPUS:
        raise RuntimeError(
            f"tier {NAME}: CUDA_VISIBLE_DEVICES={given} has too few devices; expected {NUM_GPUS} or more"
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices[:NUM_GPUS])


def is_rehearsal() -> bool:
    """Returns whether JAX_PLATFORMS=cpu JAX_EP_IMPLEMENTATION=xla runs a GPU tier on CPU devices, which is not on record."""
    return ON_GPU and os.environ["JAX_PLATFORMS"] == "cpu"


def check_installation() -> None:
    """Raises unless a GPU tier tests the installed package with its kernels, never a checkout beside it."""
    if not ON_GPU or is_rehearsal():
        return
    import jax

    import jax_ep

    installed = str(importlib.metadata.distribution("jax_ep").locate_file("jax_ep/__init__.py"))
    if not os.path.exists(installed) or not os.path.samefile(installed, jax_ep.__file__):
        raise RuntimeError(
            f"tier {NAME}: jax_ep was imported from {jax_ep.__file__}; expected the installed {installed}"
        )
    if not jax_ep.build_info()["cuda"]:
        raise RuntimeError(f"tier {NAME}: {jax_ep.__file__} was built without CUDA")
    if jax.device_count() != NUM_GPUS or jax.default_backend() != "gpu":
        raise RuntimeError(f"tier {NAME}: JAX has {jax.devices()}; expected {NUM_GPUS} GPUs")


def slow_pattern(name: str) -> str | None:
    """Returns the pattern of SLOW that makes a test slow. `name` begins with the path below tests/."""
    base, number = re.fullmatch(r"(.*?)(\d*)", name).groups()
    for pattern, num_quick in SLOW.items():
        is_first = int(number) < num_quick if number else num_quick > 0
        if fnmatch.fnmatchcase(base, pattern) and not is_first:
            return pattern
    return None


def fully_optimized(test: Callable[..., None]) -> Callable[..., None]:
    """Decorates a test that holds for programs as users compile them."""

    @functools.wraps(test)
    def wrapped(*arguments: Any, **keywords: Any) -> None:
        import jax

        name = "jax_disable_most_optimizations"
        before = jax.config.read(name)
        jax.config.update(name, False)
        jax.clear_caches()  # programs of earlier tests
        try:
            test(*arguments, **keywords)
        finally:
            jax.config.update(name, before)
            jax.clear_caches()

    return wrapped


def only_on_cpu[T](test: T) -> T:
    """Decorates a test, or a class of them, that needs a CPU or 8 devices: GPU tiers do not collect it."""
    test.only_on_cpu = True
    return test


def needs_gpus[T](count: int) -> Callable[[T], T]:
    """Decorates a test, or a class of them, that needs `count` devices: GPU tiers of fewer do not collect it."""

    def decorate(test: T) -> T:
        test.needs_gpus = count
        return test

    return decorate


def is_collected(*parts: object) -> bool:
    """Returns whether a test function and its class (either may be None) belong to this tier."""
    return not any(
        ON_GPU
        and (getattr(part, "only_on_cpu", False) or getattr(part, "needs_gpus", 0) > NUM_GPUS)
        for part in parts
    )


_prepare()
