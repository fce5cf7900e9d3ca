"""Shared by the suites: devices, meshes, routings, data, and comparisons with the numpy oracle.

Import this before anything that starts a JAX backend: it sets the devices of the tier. On CPUs JAX_EP_TEST_DEVICES says
how many; by default 8.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
import sys
import tempfile
import unittest.mock

import tier  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
import numpy_moe
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jax_ep

if not tier.ON_GPU and "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    jax.config.update("jax_num_cpu_devices", int(os.environ.get("JAX_EP_TEST_DEVICES", "8")))
NUM_DEVICES = int(os.environ.get("JAX_EP_TEST_DEVICES", jax.device_count()))
# Elements of which a row is a multiple: the kernels move 16-byte vectors, the reference any size.
ROW_UNIT = 8 if tier.ON_GPU else 1
ROW_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


# ---- the package


@contextlib.contextmanager
def plugin_package(version, module="", name="jax_ep_cuda13"):
    """Installs a plugin of a version, whose compiled module has this source; yields its folder."""
    with (
        tempfile.TemporaryDirectory() as folder,
        unittest.mock.patch.object(sys, "path", [folder, *sys.path]),
        unittest.mock.patch.dict(sys.modules),
    ):
        package = pathlib.Path(folder, name)
        package.mkdir()
        package.joinpath("__init__.py").write_text(f"__version__ = {version!r}\n")
        package.joinpath("_ffi.py").write_text(module)
        yield package


# ---- devices and meshes


def rank_counts(*candidates: int) -> list[int]:
    """Those of the candidates for which there are devices; the largest possible if none is."""
    return [count for count in candidates if count <= NUM_DEVICES] or [NUM_DEVICES]


def mesh_of(shape, names, *, axis_type=AxisType.Auto, devices=None) -> Mesh:
    count = int(np.prod(shape))
    devices = jax.devices()[:count] if devices is None else devices
    return Mesh(np.array(devices).reshape(shape), names, axis_types=(axis_type,) * len(names))


@functools.cache
def expert_mesh(num_ranks: int | None = None) -> Mesh:
    return mesh_of((num_ranks or NUM_DEVICES,), ("expert",))


def fit(shape) -> tuple[int, ...]:
    """A shape of a mesh for 8 devices, with as many devices as there are: the largest axis is halved, the first of equals."""
    shape = list(shape)
    while np.prod(shape) > NUM_DEVICES:
        shape[int(np.argmax(shape))] //= 2
    return tuple(shape)


def two_axes() -> tuple[int, int]:
    """A factorization of the number of devices, the smaller factor first: 8 = 2*4, 4 = 2*2, 2 = 1*2."""
    small = max(
        n for n in range(1, NUM_DEVICES + 1) if NUM_DEVICES % n == 0 and n * n <= NUM_DEVICES
    )
    return small, NUM_DEVICES // small


def sharded(f, mesh: Mesh, axes="expert", **kwargs):
    """jit(shard_map(f)), every argument and result split over `axes` in its first dimension."""
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P(axes), out_specs=P(axes), **kwargs))


def merge_ranks(tree):
    """[R, n, ...] -> [R*n, ...] for every array, as `P(axis)` splits it."""
    return jax.tree.map(lambda a: np.asarray(a).reshape(-1, *np.shape(a)[2:]), tree)


def split_ranks(tree, num_ranks: int):
    """[R*n, ...] -> [R, n, ...] for every array."""
    return jax.tree.map(lambda a: np.asarray(a).reshape(num_ranks, -1, *np.shape(a)[1:]), tree)


def pretend_cuda_build():
    """CUDA lowering depends on the build. This makes any build lower as one with the kernels does."""
    return unittest.mock.patch.object(jax_ep._src.core.runtime, "has_cuda", lambda: True)


def pretend_build_without_cuda():
    return unittest.mock.patch.object(jax_ep._src.core.runtime, "has_cuda", lambda: False)


# ---- a problem: static sizes; data; routes


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The static sizes of a call: what a compiled function depends on. `hidden` is rounded up to `ROW_UNIT`."""

    num_ranks: int
    num_local: int = 2
    num_tokens: int = 6
    top_k: int = 2
    hidden: int = 8
    row_align: int = 1
    recv_capacity: int | None = None
    domain_size: int | None = None  # ranks per NVLink domain

    def __post_init__(self):
        object.__setattr__(self, "hidden", -(-self.hidden // ROW_UNIT) * ROW_UNIT)

    @property
    def num_experts(self) -> int:
        return self.num_ranks * self.num_local

    @property
    def mesh(self) -> Mesh:
        return expert_mesh(self.num_ranks)

    @property
    def ids_shape(self) -> tuple[int, int, int]:
        return self.num_ranks, self.num_tokens, self.top_k

    def plans(self, topk_ids) -> list[numpy_moe.Plan]:
        return numpy_moe.make_plans(
            topk_ids,
            num_experts=self.num_experts,
            recv_capacity=self.recv_capacity,
            row_align=self.row_align,
            domain_size=self.domain_size,
        )

    def nothing(self, dtype=jnp.float32) -> jax.Array:
        """The smallest tokens that can be dispatched, where only the plan matters."""
        return jnp.zeros((self.num_tokens, ROW_UNIT), dtype)

    def dispatch(self, x, topk_ids, topk_weights, **kwargs) -> jax_ep.Dispatched:
        """`jax_ep.dispatch` with these sizes, to be called inside shard_map."""
        kwargs = {
            "axis_name": "expert",
            "row_align": self.row_align,
            "nvlink_domain_size": self.domain_size,
        } | kwargs
        return jax_ep.dispatch(
            x,
            topk_ids,
            topk_weights,
            num_experts=self.num_experts,
            recv_capacity=self.recv_capacity,
            **kwargs,
        )


def random_values(rng, shape, dtype=np.float32):
    """Normal values of several magnitudes, so that the order and the rounding of a sum show."""
    return (rng.standard_normal(shape) * 2.0 ** rng.integers(-3, 4, shape)).astype(dtype)


def distinct_ids(rng, sizes: Sizes):
    """Every token's ids are distinct; choices beyond the number of experts are -1."""
    order = rng.random((*sizes.ids_shape[:2], sizes.num_experts)).argsort(-1)[..., : sizes.top_k]
    missing = sizes.top_k - order.shape[-1]
    return np.pad(order, ((0, 0), (0, 0), (0, missing)), constant_values=-1).astype(np.int32)


def routings(sizes: Sizes, seed: int = 0) -> dict[str, np.ndarray]:
    """Ids [R, T, K] of many kinds, by name."""
    rng = np.random.default_rng(seed)
    shape, num_experts = sizes.ids_shape, sizes.num_experts
    uniform = distinct_ids(rng, sizes)
    first_choice = np.arange(sizes.top_k) == 0
    one_expert = np.where(first_choice, num_experts - 1, -1)
    last_rank = (sizes.num_ranks - 1) * sizes.num_local + np.arange(sizes.top_k) % sizes.num_local
    skewed = np.minimum(rng.geometric(0.4, shape) - 1, num_experts - 1)
    ranks = np.arange(sizes.num_ranks)[:, None, None]
    kinds = {
        "uniform": uniform,
        "repeats": rng.integers(0, num_experts, shape),
        "skewed": skewed,
        "to_one_expert": np.broadcast_to(one_expert, shape),
        "to_one_expert_by_every_choice": np.zeros(shape),
        "to_one_rank": np.broadcast_to(last_rank, shape),
        "from_one_rank": np.where(ranks == sizes.num_ranks // 2, uniform, -1),
        "to_oneself": ranks * sizes.num_local + uniform % sizes.num_local,
        "none": np.full(shape, -1),
        "half": np.where(rng.random(shape) < 0.5, uniform, -1),
        "even_experts": uniform // 2 * 2,
        "bad_ids": rng.choice(
            [-(2**31), -2, -1, 0, num_experts - 1, num_experts, 2**31 - 1], shape
        ),
    }
    return {name: np.ascontiguousarray(ids, np.int32) for name, ids in kinds.items()}


def plan_arrays(plan: jax_ep.Plan) -> dict[str, np.ndarray]:
    return {name: np.asarray(getattr(plan, name)) for name in numpy_moe.FIELDS}


# ---- a layer, for tests of transformations and meshes


def expert_layer(ids, x, topk_weights, matrices, *, axis_name="expert", **options):
    """dispatch, a matmul and a nonlinearity for each local expert, combine. Inside shard_map."""
    num_experts = matrices.shape[0] * jax.lax.axis_size(axis_name)
    sent = jax_ep.dispatch(
        x, ids, topk_weights, num_experts=num_experts, axis_name=axis_name, **options
    )
    y = jnp.tanh(jax_ep.grouped_matmul(sent.rows, matrices, sent.group_sizes))
    return jax_ep.combine(y, sent.plan, sent.row_weights)


def dense_layer(ids, x, topk_weights, matrices):
    """The same for all tokens and experts at once, without communication."""
    out = 0.0
    for k in range(ids.shape[1]):
        of_choice = matrices[jnp.maximum(ids[:, k], 0)]
        y = jnp.tanh(jnp.einsum("th,thn->tn", x, of_choice, precision="highest"))
        out += jnp.where(ids[:, k] >= 0, topk_weights[:, k], 0)[:, None] * y
    return out


def layer_arguments(
    num_tokens=4 * NUM_DEVICES, num_experts=2 * NUM_DEVICES, top_k=2, hidden=8, seed=0
):
    """ids[T,K], x[T,H], topk_weights[T,K], matrices[E,H,H] of all ranks; a quarter of the choices are -1."""
    rng = np.random.default_rng(seed)
    ids = distinct_ids(rng, Sizes(1, num_experts, num_tokens, top_k))[0]
    ids[rng.random(ids.shape) < 0.25] = -1
    floats = (
        rng.standard_normal((num_tokens, hidden)),
        rng.random((num_tokens, top_k)),
        rng.standard_normal((num_experts, hidden, hidden)) / 2,
    )
    return ids, *(a.astype(np.float32) for a in floats)


def value_and_gradients(f, *arguments):
    """f(ids, *floats), and the gradients of a sum over it with respect to the floats."""
    return compiled_value_and_gradients(f)(*arguments)


@functools.lru_cache(maxsize=8)  # the same dense functions are compared with again and again
def compiled_value_and_gradients(f):
    def loss(floats, ids):
        out = f(ids, *floats)
        return jnp.sum(jnp.sin(out)), out

    @jax.jit
    def run(ids, *floats):
        gradients, out = jax.grad(loss, has_aux=True)(floats, ids)
        return out, *gradients

    return run


def assert_same_layer(f, arguments, expected=dense_layer):
    """The values of f and the gradients of all its float arguments are those of `expected`."""
    got, expected = value_and_gradients(f, *arguments), value_and_gradients(expected, *arguments)
    names = ("out", "x", "topk_weights", "matrices")
    for name, a, b in zip(names, got, expected, strict=True):
        assert_close(a, b, name, steps=128)


# ---- comparisons


def bits(a):
    a = np.ascontiguousarray(a)
    return a.view(f"u{a.dtype.itemsize}") if a.dtype.kind in "fV" else a


def assert_bitwise(actual, expected, message=""):
    """Equal dtypes, shapes and bits: signed zeros and the payloads of NaNs count."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype, f"{message}: {actual.dtype} is not {expected.dtype}"
    assert actual.shape == expected.shape, f"{message}: {actual.shape} is not {expected.shape}"
    if not np.array_equal(bits(actual), bits(expected)):
        np.testing.assert_array_equal(
            actual.astype(np.float64), expected.astype(np.float64), message
        )
        raise AssertionError(f"{message}: equal values differ in their bits (signed zeros or NaNs)")


def assert_bitwise_but_nan(actual, expected, message=""):
    """As `assert_bitwise`, but every NaN equals every other."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected), message)
    one_nan = np.array(np.nan, expected.dtype)
    keep = ~np.isnan(expected)
    assert_bitwise(np.where(keep, actual, one_nan), np.where(keep, expected, one_nan), message)


def assert_close(actual, expected, message="", *, dtype=None, steps=8):
    """Within some rounding steps of `dtype` (the result's), relative to the largest value."""
    actual, expected = np.asarray(actual), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, f"{message}: {actual.shape} is not {expected.shape}"
    step = float(jnp.finfo(actual.dtype if dtype is None else dtype).eps)
    scale = np.abs(expected).max(initial=0.0)
    np.testing.assert_allclose(
        actual.astype(np.float64),
        expected,
        rtol=steps * step,
        atol=steps * step * scale,
        err_msg=message,
    )


def assert_sums(actual, exact, magnitudes, num_terms, message=""):
    """Sums of `num_terms` products in float32 in any order, rounded once to the result's dtype.

    A step of such a sum errs by at most one unit in the last place of the sum of magnitudes: half for float32 as it is
    specified, one for tensor cores, which cut off. `exact` and `magnitudes` are float64.
    """
    actual = np.asarray(actual)
    bound = num_terms * np.finfo(np.float32).eps * magnitudes
    if actual.dtype != np.float32:
        info = jnp.finfo(actual.dtype)
        bound = bound + float(info.eps) / 2 * (np.abs(exact) + bound) + float(info.tiny)
    error = np.abs(actual.astype(np.float64) - exact)
    assert (error <= bound).all(), f"{message}: {np.max(error / np.maximum(bound, 1e-300))} bounds"


def assert_plan(plan: jax_ep.Plan | dict, plans: list[numpy_moe.Plan], message=""):
    """Every field of a plan that came out by P(axis), as all ranks hold it."""
    arrays = plan if isinstance(plan, dict) else plan_arrays(plan)
    for name, expected in numpy_moe.stack(plans).items():
        assert_bitwise(arrays[name], expected, f"{message} plan.{name}")
    if plans[0].forwarding is not None and not isinstance(plan, dict):
        for index, name in enumerate(("token_ranks", "partial_sum_index")):
            expected = np.concatenate([plan.forwarding[index] for plan in plans])
            assert_bitwise(getattr(plan.forwarding, name), expected, f"{message} {name}")


def largest_difference(actual, expected) -> float:
    return max(
        float(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max(initial=0.0))
        for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    )
