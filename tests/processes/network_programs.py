"""Runs the parts of network_layouts.py in each of its processes."""

from __future__ import annotations

import functools
import os
import statistics

# The gradient of weights has sums over a row by XLA, which takes another order where pure JAX is in the same program.
OF_WEIGHTS, SUM_ERROR = 6, 1e-5
TIMED = ((4096, 7168, 256, 8), (128, 7168, 256, 8), (4096, 2048, 128, 8))
# Two microbatches of 4096 tokens: hidden, intermediate, experts, top-k.
LAYERS = {"DeepSeek-V3, 64 experts": (7168, 2048, 64, 8), "Qwen3-30B": (2048, 768, 128, 8)}


def bits(folder: str, domain_size: int) -> None:
    """Saves all results of calls of growing sizes, after comparing them with pure JAX."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import testing
    from jax.sharding import PartitionSpec as P
    from testing import Sizes

    import jax_ep

    ranks = jax.device_count()
    mesh = testing.mesh_of((ranks,), ("expert",))

    def layer(sizes, implementation, x, ids, weights):
        by = {"implementation": implementation}

        def forward(x, weights):
            sent = sizes.dispatch(x, ids, weights, **by)
            again = jax_ep.redispatch(-x, sent.plan, weights, **by)
            out = jax_ep.combine(sent.rows, sent.plan, sent.row_weights, **by)
            return (out, again.rows), (sent.rows, sent.row_weights, again.row_weights)

        result, gradient, rest = jax.vjp(forward, x, weights, has_aux=True)
        return result, rest, gradient(result)

    saved = {}
    few = dict(num_local=4, top_k=4)
    for number, sizes in enumerate(
        (
            Sizes(ranks, num_tokens=6, hidden=8, domain_size=domain_size, **few),
            Sizes(
                ranks, num_tokens=128, hidden=7168, num_local=16, top_k=8, domain_size=domain_size
            ),
            Sizes(
                ranks,
                num_tokens=300,
                hidden=1024,
                recv_capacity=700,
                row_align=8,
                domain_size=domain_size,
                **few,
            ),
            Sizes(
                ranks, num_tokens=4096, hidden=7168, num_local=16, top_k=8, domain_size=domain_size
            ),
            Sizes(ranks, num_tokens=6, hidden=8, domain_size=domain_size, **few),
        )
    ):
        specs = (P("expert"),) * 3
        programs = {
            name: jax.jit(
                jax.shard_map(
                    functools.partial(layer, sizes, name),
                    mesh=mesh,
                    in_specs=specs,
                    out_specs=P("expert"),
                    check_vma=False,
                )
            )
            for name in ("cuda", "xla")
        }
        rng = np.random.default_rng(number)
        rounds = 3 if sizes.num_tokens > 1000 else 30
        for round_ in range(rounds):
            total = ranks * sizes.num_tokens
            ids = rng.integers(-1, sizes.num_experts + (round_ == 0), (total, sizes.top_k)).astype(
                np.int32
            )
            weights = rng.random((total, sizes.top_k), np.float32)
            x = rng.standard_normal((total, sizes.hidden), np.float32).astype(
                jnp.bfloat16 if round_ % 2 else np.float32
            )
            arguments = [place(jax, array, mesh) for array in (x, ids, weights)]
            got, expected = (jax.tree.leaves(program(*arguments)) for program in programs.values())
            for leaf, (one, other) in enumerate(zip(got, expected, strict=True)):
                ours, theirs = (np.asarray(a.addressable_shards[0].data) for a in (one, other))
                if leaf == OF_WEIGHTS:
                    bound = SUM_ERROR * max(1, np.abs(theirs).max(initial=0))
                    np.testing.assert_allclose(ours, theirs, rtol=0, atol=bound)
                else:
                    testing.assert_bitwise(ours, theirs, f"{sizes} {round_} {leaf}")
                if round_ < 2:
                    saved[f"{number} {round_} {leaf}"] = ours.view(
                        np.uint8 if ours.dtype == bool else f"u{ours.dtype.itemsize}"
                    )
        jax_ep.check()
        if jax.process_index() == 0:
            print(
                f"BITS {sizes}: {rounds} rounds with {len(got)} results each are right", flush=True
            )
        if number == 2:
            print(f"RELEASED {jax_ep.release()} bytes", flush=True)
    np.savez(f"{folder}/{jax.process_index()}.npz", **saved)


def place(jax, whole, mesh):
    """Makes an array from what all processes have."""
    sharding = jax.NamedSharding(mesh, jax.sharding.PartitionSpec("expert"))
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def times(domain_size: int) -> None:
    """Prints the median of each operation, in microseconds."""
    import jax
    import time_layouts

    from jax_ep.bench.common.benchmark import Case
    from jax_ep.bench.transfer import benchmark, problem, providers

    mesh = problem.make_mesh(jax.device_count())
    for sizes in TIMED:
        shape = problem.Shape(*sizes)
        made = problem.make_problem(mesh, shape, "balanced", 100e6)
        for operation in ("dispatch", "redispatch", "combine"):
            case = Case(operation, shape, "balanced", benchmark.BENCHMARK.chains(shape)[-1])
            started = providers.Ours(domain_size=domain_size).start(case, made)
            found = time_layouts.burst_times(
                started, 2 if os.environ.get("JAX_EP_TEST_PACE") else 10
            )
            if jax.process_index() == 0:
                network = os.environ["JAX_EP_NETWORK"]
                print(
                    f"TIME {network} {operation} [{shape}]: {statistics.median(found):.1f} us",
                    flush=True,
                )


def failure(domain_size: int) -> None:
    """The last device makes no call. The others' end, say why, and work again after a release."""
    import time

    import jax
    import numpy as np
    import testing
    from jax.experimental import multihost_utils
    from jax.sharding import PartitionSpec as P
    from testing import Sizes

    import jax_ep

    ranks = jax.device_count()
    mesh = testing.mesh_of((ranks,), ("expert",))
    sizes = Sizes(ranks, num_tokens=200, hidden=512, domain_size=domain_size)

    def transfer(x, ids, weights):
        sent = sizes.dispatch(x, ids, weights, implementation="cuda")
        return jax_ep.combine(sent.rows, sent.plan, sent.row_weights, implementation="cuda")

    program = jax.jit(
        jax.shard_map(
            transfer, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"), check_vma=False
        )
    )
    rng = np.random.default_rng(0)
    total = ranks * sizes.num_tokens
    arguments = [
        place(jax, array, mesh)
        for array in (
            rng.standard_normal((total, sizes.hidden), np.float32),
            rng.integers(0, sizes.num_experts, (total, sizes.top_k)).astype(np.int32),
            rng.random((total, sizes.top_k), np.float32),
        )
    ]
    first = np.asarray(program(*arguments).addressable_shards[0].data)
    jax_ep.check()
    multihost_utils.sync_global_devices("first")
    begin = time.monotonic()
    if jax.process_index() == ranks - 1:
        os.environ["JAX_EP_TEST_ABSENT_DEVICE"] = str(jax.local_devices()[0].local_hardware_id)
    problem = None
    try:
        jax.block_until_ready(program(*arguments))
        jax_ep.check()
    except Exception as error:  # noqa: BLE001  both processes have to go on
        problem = error
    print(
        f"FAILURE process {jax.process_index()} after {time.monotonic() - begin:.1f} s: {problem}",
        flush=True,
    )
    os.environ.pop("JAX_EP_TEST_ABSENT_DEVICE", None)
    time.sleep(2)
    jax_ep.release()
    again = np.asarray(program(*arguments).addressable_shards[0].data)
    jax_ep.check()
    testing.assert_bitwise(again, first, "after a release")
    print(f"RIGHT AGAIN process {jax.process_index()}", flush=True)


def microbatches(domain_size: int) -> None:
    """Prints the times of layers of 2 * 4096 tokens, forward in two chunks and both passes."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import testing
    from jax.sharding import PartitionSpec as P

    ranks = jax.device_count()
    mesh = testing.mesh_of((ranks,), ("expert",))
    for name, (hidden, intermediate, experts, top_k) in LAYERS.items():
        total = ranks * 2 * 4096
        rng = np.random.default_rng(0)
        ids = rng.random((total, experts)).argsort(axis=1)[:, :top_k].astype(np.int32)
        x = rng.standard_normal((total, hidden), np.float32).astype(jnp.bfloat16)
        topk_weights = np.full((total, top_k), 1 / top_k, np.float32)
        up = (experts, hidden, 2 * intermediate)
        w_up, w_down = (
            jax.jit(
                lambda key, s=shape: jax.random.normal(key, s, jnp.bfloat16) * s[1] ** -0.5,
                out_shardings=jax.NamedSharding(mesh, P("expert")),
            )(jax.random.key(seed))
            for seed, shape in enumerate((up, (experts, intermediate, hidden)))
        )
        operands = [*(place(jax, array, mesh) for array in (x, ids, topk_weights)), w_up, w_down]
        options = {
            "axis_name": "expert", "num_experts": experts, "nvlink_domain_size": domain_size,
        }  # fmt: skip
        for passes, function in {"forward, two chunks": forward, "both passes": both}.items():
            time_layer(f"{name}, {passes}", functools.partial(function, options), operands)


def forward(options, overlap, *operands):
    import jax_ep

    y, _ = jax_ep.moe_mlp(*operands, **options, num_chunks=2, remat=None, overlap=overlap)
    return (y,)


def both(options, overlap, x, ids, *floats):
    import jax

    import jax_ep

    def layer(x, *floats):
        return jax_ep.moe_mlp(x, ids, *floats, **options, overlap=overlap)[0]

    y, backward = jax.vjp(layer, x, *floats)
    return (y, *backward(y))


def time_layer(name: str, function, operands) -> None:
    """Prints the times of a layer with transfers one after another, and in flight."""
    import time

    import jax
    import numpy as np
    import testing
    from jax.sharding import PartitionSpec as P

    import jax_ep

    mesh = testing.mesh_of((jax.device_count(),), ("expert",))
    specs = {"in_specs": P("expert"), "out_specs": P("expert")}
    found, outs = {}, {}
    for overlap in (False, True, False, True):
        part = functools.partial(function, overlap)
        program = jax.jit(jax.shard_map(part, mesh=mesh, **specs, check_vma=False))
        results = program(*operands)[:2]  # the output, and the gradient of x
        outs[overlap] = [np.asarray(each.addressable_shards[0].data) for each in results]
        for _ in range(10):
            begin = time.perf_counter()
            jax.block_until_ready(program(*operands))
            found.setdefault(overlap, []).append(1e6 * (time.perf_counter() - begin))
    for one, other in zip(outs[True], outs[False], strict=True):
        testing.assert_bitwise(one, other, name)
    jax_ep.check()
    apart, beside = (statistics.median(found[overlap]) for overlap in (False, True))
    if jax.process_index() == 0:
        network = f"{os.environ['JAX_EP_NETWORK']} {os.environ.get('JAX_EP_TEST_PACE', '')}"
        print(
            f"TIME {network} {name}: {apart:.0f} us one after another, {beside:.0f} us in "
            f"flight, {apart / beside:.2f} x",
            flush=True,
        )
