"""Programs lowered for CUDA on any machine: what they call, and what else is in them."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import re
import unittest.mock
import warnings

import testing  # isort: skip

import jax
import jax.ffi
import numpy as np

import jax_ep

COLLECTIVES = (
    "all_gather", "all_reduce", "all_to_all", "collective_broadcast", "collective_permute", "reduce_scatter"
)  # fmt: skip
# What a program may do with a large array besides calling jax_ep: nothing that costs anything.
FREE = {
    "custom_call",
    "return",
    "manual_computation",
    "func",
    "call",
    "sharding_constraint",
    "reshape",
}


@dataclasses.dataclass(frozen=True)
class Call:
    """One custom call of jax_ep."""

    target: str
    attributes: dict[str, object]
    operands: tuple[str, ...]  # types as StableHLO writes them, e.g. "8x2xi32"
    results: tuple[str, ...]
    aliases: dict[int, int]  # operand -> result


@dataclasses.dataclass(frozen=True)
class Program:
    lowered: jax.stages.Lowered

    @property
    def text(self) -> str:
        return self.lowered.as_text()

    @property
    def calls(self) -> list[Call]:
        pattern = r"custom_call @(jax_ep\.[\w.]+)\(.*mhlo\.backend_config = \{(.*?)\}, (.*) : \((.*)\) -> (.*)"
        return [
            Call(target, _attributes(attributes), _types(operands), _types(results), _aliases(rest))
            for target, attributes, rest, operands, results in re.findall(pattern, self.text)
        ]

    @property
    def targets(self) -> collections.Counter[str]:
        """How often each operation is called, by its name without "jax_ep." and ".v1"."""
        return collections.Counter(call.target.split(".")[1] for call in self.calls)

    def call(self, operation: str) -> Call:
        (call,) = [call for call in self.calls if call.target == f"jax_ep.{operation}.v1"]
        return call

    def operations_on(self, num_elements: int) -> set[str]:
        """The operations, other than free ones, that read or write an array of so many elements or more."""
        found = set()
        for line in self.text.splitlines():
            name = re.search(r'(?:= |^ *)"?(?:stablehlo|sdy|func|mhlo|chlo)\.(\w+)', line)
            sizes = [_num_elements(shape) for shape in re.findall(r"tensor<([^>]*)>", line)]
            if name and name[1] not in FREE and max(sizes, default=0) >= num_elements:
                found.add(name[1])
        return found

    def collectives(self) -> list[str]:
        """Collectives that are in the program itself, before the compiler has added any."""
        return re.findall(rf"stablehlo\.({'|'.join(COLLECTIVES)})\b", self.text)

    def partitioned(self) -> str:
        """The program after XLA's partitioner, by compiling it for this machine's CPU.

        This registers handlers that do nothing there: use a process of its own.
        """
        from jaxlib.cpu import _lapack

        some_handler = _lapack.registrations()["lapack_sgetrf_ffi"]
        for target in {call.target for call in self.calls}:
            jax.ffi.register_ffi_target(target, some_handler, platform="cpu")
        return self.lowered.compile().as_text()


def partitioned_collectives(text: str) -> list[str]:
    """The collectives of a compiled program."""
    names = "|".join(name.replace("_", "-") for name in COLLECTIVES)
    return re.findall(rf" ({names})(?:-start)?\(", text)


def lower_for_cuda(f, *arguments, cuda_build: bool = True) -> Program:
    """`f`, jitted and lowered for CUDA as a build with the kernels would lower it (or one without)."""
    pretend = testing.pretend_cuda_build() if cuda_build else testing.pretend_build_without_cuda()
    with pretend:
        # A new function each time: JAX caches what it has lowered.
        lowered = (
            jax.jit(lambda *args: f(*args)).trace(*arguments).lower(lowering_platforms=("cuda",))
        )
    return Program(lowered)


@contextlib.contextmanager
def fallback_warnings():
    """The list of jax_ep's warnings from here on, as if none had been given before."""
    messages = []
    with (
        unittest.mock.patch.object(jax_ep._src.core.primitive, "_warned", set()),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        try:
            yield messages
        finally:
            ours = [w for w in caught if str(w.message).startswith("jax_ep.")]
            assert all(w.category is UserWarning for w in ours), ours
            messages += [str(w.message) for w in ours]


def struct(shape, dtype=np.float32, sharding=None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _num_elements(shape: str) -> int:
    return math.prod(int(size) for size in re.findall(r"(\d+)x", shape))


def _types(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"tensor<([^>]*)>", text))


def _aliases(text: str) -> dict[int, int]:
    found = re.findall(r"output_tuple_indices = \[(\d*)\], operand_index = (\d+)", text)
    return {int(operand): int(result or 0) for result, operand in found}


def _attributes(text: str) -> dict[str, object]:
    """Scalars with their type, e.g. ("i64", 4) or ("bool", True); strings alone; arrays as (type, list)."""
    found: dict[str, object] = {}
    for name, value in re.findall(r"(\w+) = (dense<[^>]*> : tensor<\w+>|[^,]+)", text):
        dense = re.fullmatch(r"dense<\[?([^\]]*?)\]?> : tensor<(\d+)xi64>", value)
        scalar = re.fullmatch(r"(-?\d+) : (\w+)", value)
        real = re.fullmatch(r"(-?[\d.]+[eE][-+]?\d+) : (\w+)", value)
        if dense:
            numbers = [int(n) for n in dense[1].split(",")]
            found[name] = ("i64[]", numbers * (int(dense[2]) // len(numbers)))
        elif scalar:
            found[name] = (scalar[2], int(scalar[1]))
        elif real:
            found[name] = (real[2], float(real[1]))
        elif value.startswith('"'):
            found[name] = value.strip('" ')
        else:
            found[name] = ("bool", {"true": True, "false": False}[value.strip()])
    return found
