"""tune: measures on how many SMs transfers of a shape are fastest."""

from __future__ import annotations

import functools
import math
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ep._src.core import checks, runtime
from jax_ep._src.core.chain import chain
from jax_ep._src.core.errors import ArgumentError, UnavailableError
from jax_ep._src.core.make_mesh import make_mesh
from jax_ep._src.quant.formats import Format, check_format
from jax_ep._src.quant.quantize import quantize
from jax_ep._src.quant.quantized import row_bytes
from jax_ep._src.transfer.combine import combine
from jax_ep._src.transfer.dispatch import dispatch
from jax_ep._src.transfer.domains import check_domain_size
from jax_ep._src.transfer.plan import Dispatched, Plan
from jax_ep._src.transfer.redispatch import redispatch
from jax_ep._src.transfer.tuning import Call, Microseconds, write

AXIS = "expert"
OPERATIONS = ("dispatch", "redispatch", "combine")
PARTS = (1, 2, 3, 4, 6, 8, 10)  # twelfths of all SMs
CHAINED, CHAINED_OF_FEW = 16, 128  # calls of a program; the host launches it in some 100 µs
FEW_TOKENS = 256
REPETITIONS = 10
TOLERANCE = 0.01  # fewer SMs are worth so much of the best time


def tune(
    file: str | os.PathLike[str],
    num_tokens: int,
    hidden_size: int,
    num_experts: int,
    top_k: int,
    *,
    mesh: Mesh | None = None,
    dtype: Any = jnp.bfloat16,
    quantization: Format | None = None,
    nvlink_domain_size: int | None = None,
) -> dict[str, Mapping[int, float]]:
    """Measures the transfers of a shape, each with several numbers of SMs, and writes the best.

    The best is the least number of SMs within 1 % of the shortest time, with random routes. After
    `use_tuning`, calls of this shape on this kind of GPU use it. The file keeps what it has of
    other shapes and GPUs. It takes about a minute, mostly to compile. Several processes all call
    it, with a file that each of them can read later.

    For example::

        def tune_for_this_machine():
            jax_ep.tune("tuning.json", 4096, 7168, num_experts=256, top_k=8)
            jax_ep.use_tuning("tuning.json")

    Args:
      file: where to write, or to add to.
      num_tokens: T, per rank.
      hidden_size: H.
      num_experts: E, of all ranks.
      top_k: K.
      mesh: of one axis, the ranks; None takes all devices.
      dtype: of the tokens.
      quantization: the format in which dispatch and redispatch send rows; None sends `dtype`.
      nvlink_domain_size: as in `dispatch`.

    Returns:
      The microseconds of a call by operation, and by number of SMs, of which 0 lets jax_ep choose.

    Raises:
      ArgumentError (a ValueError), DtypeError (a TypeError): the sizes do not fit, or `file` is
        something else.
      UnavailableError (a NotImplementedError): there is no GPU.
    """
    if not (gpu := runtime.gpu_kind()):
        raise UnavailableError(
            "jax_ep.tune: JAX has no GPU here; expected those whose transfers are to be measured. "
            "Run it on the machine of the program."
        )
    problem = Problem(
        mesh or make_mesh((jax.device_count(),), (AXIS,)),
        Sizes(num_tokens, hidden_size, num_experts, top_k),
        jnp.dtype(dtype),
        quantization,
        nvlink_domain_size,
    )
    calls = measure(problem, candidates(runtime.num_sms()))
    write(pathlib.Path(file), gpu, calls)
    return {call.operation: times for call, (_, times) in calls.items()}


def candidates(num_sms: int) -> tuple[int, ...]:
    """Returns the numbers of SMs to try, of which 0 lets the launch code choose."""
    return (*(num_sms * part // 12 for part in PARTS), 0)


def measure(problem: Problem, candidates: Sequence[int]) -> dict[Call, tuple[int, Microseconds]]:
    """Returns the best number of SMs of each operation, and the times of all."""
    found: dict[Call, tuple[int, Microseconds]] = {}
    for operation in OPERATIONS:
        seconds = {sms: problem.seconds(operation, sms) for sms in candidates}
        times = {sms: round(1e6 * value, 2) for sms, value in seconds.items()}
        found[problem.call(operation)] = best(times), times
    return found


def best(times: Microseconds) -> int:
    """Returns the least number of SMs that is fast enough; 0, which may take all, is the most."""
    limit = min(times.values()) * (1 + TOLERANCE)
    return min((n for n, time in times.items() if time <= limit), key=lambda n: n or math.inf)


class Sizes(NamedTuple):
    """The sizes of a call: T per rank, H, E, K."""

    num_tokens: int
    hidden_size: int
    num_experts: int
    top_k: int


class Problem:
    """Random tokens and routes over a mesh, and the transfers of them."""

    def __init__(
        self,
        mesh: Mesh,
        sizes: Sizes,
        dtype: np.dtype[Any],
        quantization: Format | None,
        domain_size: int | None,
    ) -> None:
        for name, size in sizes._asdict().items():
            checks.integer("tune", name, size)
        if len(mesh.axis_names) != 1 or sizes.num_experts % mesh.size:
            raise ArgumentError(
                f"jax_ep.tune: num_experts={sizes.num_experts} over a mesh of axes "
                f"{dict(mesh.shape)}; expected one axis, whose size divides the experts. Give the "
                "ranks of one expert axis, as by jax_ep.make_mesh((4,), ('expert',), devices=...)."
            )
        if sizes.top_k > sizes.num_experts:
            raise ArgumentError(
                f"jax_ep.tune: top_k={sizes.top_k} with num_experts={sizes.num_experts}; expected "
                "at most as many, as the experts of a token are distinct. Give the layer's sizes."
            )
        if quantization is not None:
            check_format("tune", quantization)
        self.mesh, self.sizes = mesh, sizes
        self.axis = mesh.axis_names[0]
        self.domain_size = check_domain_size("tune", domain_size, mesh.size)
        ids = self._ids()
        x = self._normal(mesh.size * sizes.num_tokens, sizes.hidden_size, dtype)
        weights = self._normal(len(ids), sizes.top_k, jnp.dtype(jnp.float32))
        if quantization is not None:
            x = self._mapped(lambda x: quantize(x, quantization))(x)
        self.row_bytes = {"combine": sizes.hidden_size * dtype.itemsize}
        self.row_bytes |= dict.fromkeys(("dispatch", "redispatch"), row_bytes(x))
        tokens = x, ids, weights
        sent = self.program("dispatch", 0)(*tokens)
        y = self._normal(mesh.size * self.capacity, sizes.hidden_size, dtype)
        self.arguments = {
            "dispatch": tokens,
            "redispatch": (x, sent.plan),
            "combine": (y, sent.plan),
        }

    def call(self, operation: str) -> Call:
        """Returns what the operation is looked up by."""
        num_tokens, _, num_experts, top_k = self.sizes
        sizes = (self.mesh.size, num_tokens, self.row_bytes[operation], top_k, num_experts)
        return Call(operation, *sizes, self.domain_size)

    def program(self, operation: str, num_sms: int, num_calls: int = 1) -> Callable[..., Any]:
        """Returns calls one after another, compiled, of the operation's `arguments`."""
        call = functools.partial(getattr(self, f"_{operation}"), num_sms)
        return jax.jit(self._mapped(chain(call, num_calls)))

    def seconds(self, operation: str, num_sms: int) -> float:
        """Returns the median seconds of a call, the longest of all processes."""
        calls = CHAINED_OF_FEW if self.sizes.num_tokens <= FEW_TOKENS else CHAINED
        program = self.program(operation, num_sms, calls)
        arguments = self.arguments[operation]
        jax.block_until_ready(program(*arguments))
        times = []
        for _ in range(REPETITIONS):
            begin = time.perf_counter()
            jax.block_until_ready(program(*arguments))
            times.append((time.perf_counter() - begin) / calls)
        seconds = statistics.median(times)
        if jax.process_count() > 1:  # all have to choose the same
            from jax.experimental import multihost_utils

            seconds = float(multihost_utils.process_allgather(np.float32(seconds)).max())
        return seconds

    def _ids(self) -> jax.Array:
        """Returns distinct experts of each token; no rank receives more than `capacity` rows."""
        num_tokens, _, num_experts, top_k = self.sizes
        shape = (self.mesh.size * num_tokens, num_experts)
        order = np.argsort(np.random.default_rng(0).random(shape, np.float32), axis=1)
        ids = order[:, :top_k].astype(np.int32)
        self.capacity = int(np.bincount(ids.ravel() // (num_experts // self.mesh.size)).max())
        return jax.make_array_from_callback(ids.shape, self._split, ids.__getitem__)

    def _normal(self, rows: int, columns: int, dtype: np.dtype[Any]) -> jax.Array:
        @functools.partial(jax.jit, out_shardings=self._split)
        def normal() -> jax.Array:
            return jax.random.normal(jax.random.key(0), (rows, columns), dtype)

        return normal()

    @property
    def _split(self) -> NamedSharding:
        return NamedSharding(self.mesh, P(self.axis))

    def _mapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        spec = P(self.axis)
        return jax.shard_map(function, mesh=self.mesh, in_specs=spec, out_specs=spec)

    def _dispatch(self, num_sms: int, x: Any, ids: jax.Array, weights: jax.Array) -> Dispatched:
        return dispatch(
            *(x, ids, weights),
            num_experts=self.sizes.num_experts,
            axis_name=self.axis,
            recv_capacity=self.capacity,
            nvlink_domain_size=self.domain_size,
            num_sms=num_sms or None,
        )

    def _redispatch(self, num_sms: int, x: Any, plan: Plan) -> Any:
        return redispatch(x, plan, num_sms=num_sms or None)

    def _combine(self, num_sms: int, y: jax.Array, plan: Plan) -> jax.Array:
        return combine(y, plan, None, num_sms=num_sms or None)
