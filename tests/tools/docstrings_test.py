"""Every public function and option has an example in its docstring, which runs."""

from __future__ import annotations

import inspect
import re
import textwrap

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from flax import nnx
from jax.sharding import PartitionSpec as P

import jax_ep
import jax_ep.linen
import jax_ep.nnx
from jax_ep import checkpoints, quant

MODULES = jax_ep, checkpoints, jax_ep.linen, jax_ep.nnx, quant, jax_ep.routing
# Calls return these, and nobody makes them by hand.
RESULTS = {
    "jax_ep.Accumulators", "jax_ep.Dispatched", "jax_ep.InFlight", "jax_ep.Memory", "jax_ep.Plan", "jax_ep.Profile", "jax_ep.Stats", "jax_ep.linen.MoEStats",
    "jax_ep.nnx.MoEStats", "jax_ep.nnx.SelectionBias", "jax_ep.checkpoints.Checkpoint", "jax_ep.quant.Format",
    "jax_ep.quant.QuantizedWeights", "jax_ep.routing.Routing",
}  # fmt: skip
# Excerpts, which other tests have in whole.
EXCERPTS = {
    "jax_ep.accumulators": "tests/operations/layer_stack_test.py",
    "jax_ep.export_checks": "tests/lowering/export_test.py",
    "jax_ep.checkpoints.load": "tests/checkpoints/parity_test.py",
    "jax_ep.checkpoints.save": "tests/checkpoints/files_test.py",
    "jax_ep.checkpoints.moe_options": "tests/checkpoints/parity_test.py",
    "jax_ep.checkpoints.linen_variables": "tests/checkpoints/parity_test.py",
    "jax_ep.checkpoints.from_maxtext": "tests/checkpoints/maxtext_test.py",
}
IN_SHARD_MAP = {
    "jax_ep.dispatch", "jax_ep.combine", "jax_ep.redispatch", "jax_ep.moe_mlp", "jax_ep.dispatch_start", "jax_ep.dispatch_done",
    "jax_ep.combine_start", "jax_ep.combine_done", "jax_ep.overlap",
}  # fmt: skip
EXAMPLE = re.compile(r"::\n\n((?:    .*\n|\n)+)")


def public() -> dict[str, str]:
    """The docstrings of functions and classes, without exceptions and results."""
    found = {}
    for module in MODULES:
        for name in module.__all__:
            value, full = getattr(module, name), f"{module.__name__}.{name}"
            is_error = inspect.isclass(value) and issubclass(value, Exception)
            if (inspect.isfunction(value) or inspect.isclass(value)) and not is_error:
                found[full] = inspect.getdoc(value) or ""
    return {name: text for name, text in found.items() if name not in RESULTS}


def examples(text: str) -> list[str]:
    return [textwrap.dedent(block) for block in EXAMPLE.findall(f"{text}\n")]


def arrays(num_ranks: int) -> dict[str, jax.Array]:
    """Tokens, routes and the weights of 16 experts, of so many ranks together."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    return {
        "x": normal(8 * num_ranks, 128),
        "topk_ids": jnp.asarray(rng.integers(0, 16, (8 * num_ranks, 2)), jnp.int32),
        "topk_weights": jnp.full((8 * num_ranks, 2), 0.5),
        "w_up": normal(16, 128, 2, 128),
        "w_down": normal(16, 128, 128),
    }


def names() -> dict[str, object]:
    """Makes what examples use beside arrays."""
    values, scales = jnp.ones((2, 128, 128), jnp.float8_e4m3fn), jnp.ones((2, 1, 1))
    return {
        "jax": jax, "jnp": jnp, "nnx": nnx, "jax_ep": jax_ep, "quant": quant, "checkpoints": checkpoints,
        "router": jnp.linspace(-1, 1, 128 * 16).reshape(128, 16), "y": jnp.ones(3), "in_files": [(values, scales)] * 3,
        "stack": {"router_kernel": jnp.ones((3, 8, 4)), "w_up": jnp.ones((3, 4, 8, 2, 6)), "w_down": jnp.ones((3, 4, 6, 8))},
    }  # fmt: skip


class ExamplesTest(parameterized.TestCase):
    def test_everything_has_one(self):
        self.assertEmpty([name for name, text in public().items() if not examples(text)])
        self.assertContainsSubset(EXCERPTS, public())

    @parameterized.parameters(*sorted({*public()} - {*EXCERPTS} - IN_SHARD_MAP))
    def test_runs(self, name):
        for source in examples(public()[name]):
            exec(compile(source, name, "exec"), names() | arrays(1))

    @parameterized.parameters(*sorted(IN_SHARD_MAP))
    def test_runs_in_shard_map(self, name):
        (source,) = examples(public()[name])
        local = names()

        def run(given):
            exec(compile(source, name, "exec"), found := local | given)
            results = [found[result] for result in ("squares", "out", "y") if result in found]
            return results[0]

        mapped = jax.shard_map(
            run, mesh=testing.expert_mesh(8), in_specs=P("expert"), out_specs=P("expert")
        )
        self.assertTrue(np.isfinite(np.asarray(jax.jit(mapped)(arrays(8)))).all())


if __name__ == "__main__":
    absltest.main()
