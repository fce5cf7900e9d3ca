"""`python -m jax_ep.bench layer`: its layers and parts, and a smoke run."""

from __future__ import annotations

import argparse
import copy
import pathlib
import tempfile
import types
import unittest.mock

import testing  # isort: skip  # noqa: F401  sets the devices

import jax
import jax.numpy as jnp
import numpy as np
import unspecified_rows
from absl.testing import absltest, parameterized
from bench_command import ragged_all_to_all, run, smoke
from programs import lower_for_cuda

from jax_ep.bench.common import harness
from jax_ep.bench.common.benchmark import Case
from jax_ep.bench.common.programs import sharded
from jax_ep.bench.common.report import OURS
from jax_ep.bench.layer import baselines as layer_baselines
from jax_ep.bench.layer import benchmark as layer_benchmark
from jax_ep.bench.layer import figures as layer_figures
from jax_ep.bench.layer import passes as layer_passes
from jax_ep.bench.layer import providers as layer_providers
from jax_ep.bench.layer import quantized as layer_quantized
from jax_ep.bench.layer.benchmark import (
    BENCHMARK,
    MAX_FOUR_BIT_DIFFERENCE,
    MAX_FP8_DIFFERENCE,
    SMOKE_ROUNDS,
)
from jax_ep.bench.layer.calls import Calls, values_of
from jax_ep.bench.layer.parts import DENSE, PARTS
from jax_ep.bench.layer.problem import MODELS, Shape, make_problem
from jax_ep.bench.transfer.problem import make_mesh

SHAPE = Shape(tokens=40, hidden=32, intermediate=16, experts=2, top_k=2)
BY_NAME = {provider.name: provider for provider in BENCHMARK.providers}


def problem_of(num_ranks=1, weights="bfloat16", shape=SHAPE):
    return make_problem(make_mesh(num_ranks), shape, weights, 0)


def case_of(operation, weights="bfloat16", chained=1, shape=SHAPE):
    return Case(operation, shape, weights, chained)


def results_of(name, operation, problem, chained=1):
    case = case_of(operation, problem.weight_dtype, chained, problem.shape)
    started = BY_NAME[name].start(case, problem)
    if isinstance(started, list):
        (started,) = started
    return [np.asarray(a, np.float64) for a in jax.tree.leaves(started.call(started.arguments[0]))]


def assert_near(found, expected, tolerance=0.02):
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b), np.abs(a - b).max()


def plain_results(operation, problem):
    """The layer and its gradients in float64, with a loop over the experts."""
    x, out_bar, ids, weights, w_up, w_down = (np.asarray(a) for a in problem.sets[0])
    with jax.enable_x64(True):
        floats = [jnp.asarray(a, jnp.float64) for a in (x, weights, w_up, w_down)]

        def layer(x, weights, w_up, w_down):
            out = jnp.zeros_like(x)
            for expert in range(len(w_up)):
                gate, up = jnp.split(x @ w_up[expert], 2, -1)
                weight = (weights * (ids == expert)).sum(1, keepdims=True)
                out += weight * (jax.nn.silu(gate) * up @ w_down[expert])
            return out

        out, backward = jax.vjp(layer, *floats)
        results = (
            [out] if operation == "forward" else [out, *backward(jnp.asarray(out_bar, out.dtype))]
        )
        return [np.asarray(a) for a in results]


class LayersTest(parameterized.TestCase):
    @parameterized.parameters(
        *(
            (1, name)
            for name in (OURS, "sort, lax.ragged_dot, gather", "sort, lax.ragged_dot, scatter")
        ),
        *((4, name) for name in (OURS, "all_gather, lax.ragged_dot, psum_scatter")),
    )
    def test_same_results(self, num_ranks, name):
        problem = problem_of(num_ranks, "float32")
        for operation in BENCHMARK.operations:
            found = results_of(name, operation, problem)
            assert_near(found, plain_results(operation, problem))

    def test_quantized(self):
        """Results differ from those of jax_ep by more than roundings, and no more than allowed."""
        problem = problem_of()
        expected = results_of(OURS, "both", problem)
        results = [results_of(p.name, "both", problem) for p in layer_quantized.LAYERS]
        for result, exact in zip(results[0], expected, strict=True):
            difference = np.linalg.norm(result - exact) / np.linalg.norm(exact)
            self.assertBetween(difference, 0.02, MAX_FP8_DIFFERENCE)
        for other, provider in zip(results[1:], layer_quantized.LAYERS[1:], strict=True):
            *first, up, down = zip(other, results[0], strict=True)
            for result, same in first:
                np.testing.assert_array_equal(result, same)
            rounds_up = provider.recipe.quantized_weight_gradients
            # w_down's gradient may read cotangents that were quantized before they were sent.
            rounds_down = rounds_up or provider.recipe.quantized_cotangents
            for (result, same), rounds in ((up, rounds_up), (down, rounds_down)):
                difference = np.linalg.norm(result - same) / np.linalg.norm(same)
                self.assertBetween(difference, *((0.005, 0.06) if rounds else (0, 0)))

    def test_weights_in_four_bits(self):
        problem = problem_of()
        (exact,) = results_of(OURS, "forward", problem)
        (result,) = results_of(layer_quantized.IN_FOUR_BITS.name, "forward", problem)
        difference = np.linalg.norm(result - exact) / np.linalg.norm(exact)
        self.assertBetween(difference, 0.1, MAX_FOUR_BIT_DIFFERENCE)

    def test_quantized_layers_are_asked_for(self):
        quantized = {p.name for p in layer_quantized.PROVIDERS}
        for option, expected in (True, quantized), (False, set()):
            arguments = types.SimpleNamespace(provider=None, quantization=option, domain_size=None)
            chosen = {p.name for p in BENCHMARK.chosen_providers(arguments)}
            self.assertEqual(chosen & quantized, expected)

    def test_steps_of_microbatches(self):
        """A step quantizes once; rounds are compared with themselves."""
        rounds = lambda *means: {"rounds": [{"mean": mean} for mean in means]}
        measured = {
            OURS: rounds(6.0, 12.0, 6.0),
            layer_quantized.QUANTIZING.name: rounds(8.0, 16.0, 8.0),
            layer_quantized.LAYERS[0].name: rounds(3.0, 6.0, 3.0),
        }
        layer_figures.add_speedups({"measurements": measured})
        found = measured[layer_quantized.LAYERS[0].name]
        self.assertEqual((found["speedup_1"], found["speedup_8"]), (6 / 11, 1.5))

    def test_einsum(self):
        """With slots enough it drops nothing; the capacity of 1.25 does."""
        problem = problem_of()
        x, _, *others = problem.sets[0]
        expected = plain_results("forward", problem)
        for factor, drops in ((2.0, False), (0.7, True)):
            layer = layer_baselines.einsum(problem, jax.lax.ragged_dot, factor)
            found = [np.asarray(layer(x, *others), np.float64)]
            if drops:
                is_dropped = np.linalg.norm(found[0] - expected[0], axis=1) > 0.1
                self.assertBetween(is_dropped.mean(), 0.1, 0.9)
            else:
                assert_near(found, expected)

    def test_unspecified_rows(self):
        """Rows past the last group, which some grouped matmuls leave unspecified, change nothing."""
        problem = problem_of(4, "float32")
        layer = layer_baselines.gather_scatter(problem, unspecified_rows.ragged_dot)
        arguments = layer_passes.arguments_of("both", problem.sets[0])
        compute = sharded(layer_passes.pass_of("both", layer), problem.mesh, check_vma=False)
        found = [np.asarray(a, np.float64) for a in jax.tree.leaves(jax.jit(compute)(*arguments))]
        assert_near(found, plain_results("both", problem))

    def test_ragged_all_to_all(self):
        """Its offsets send rows into the order of experts, and back, by a simulation."""
        ranks, num_local = 4, 2
        ids = np.random.default_rng(0).integers(0, 8, (ranks, 9, 3)).astype(np.int32)
        mapped = sharded(lambda i: layer_baselines.exchanges(i, 8, num_local), make_mesh(ranks))
        there, back, sizes = jax.tree.map(
            lambda a: np.split(np.asarray(a), ranks), jax.jit(mapped)(ids.reshape(-1, 3))
        )
        experts = np.sort(ids.reshape(ranks, -1), 1)
        sent = [e * 100 + rank for rank, e in enumerate(experts)]
        arrived = [np.full(s.sum(), -1) for s in sizes]
        for written in ragged_all_to_all(sent, arrived, *there):
            np.testing.assert_array_equal(written, 1)
        for rank, rows in enumerate(arrived):
            np.testing.assert_array_equal(rows, np.sort(rows))
            np.testing.assert_array_equal(np.unique(rows // 100 // num_local), rank)
            local = np.bincount(rows // 100, minlength=8)[rank * num_local :][:num_local]
            np.testing.assert_array_equal(sizes[rank], local)
        home = [np.full(27, -1) for _ in range(ranks)]
        ragged_all_to_all(arrived, home, *back)
        np.testing.assert_array_equal(home, sent)

    def test_ragged_all_to_all_lowers(self):
        problem = problem_of(4)
        layer = layer_baselines.ragged_all_to_all(problem, jax.lax.ragged_dot)
        arguments = layer_passes.arguments_of("both", problem.sets[0])
        compute = sharded(layer_passes.pass_of("both", layer), problem.mesh, check_vma=False)
        self.assertIn("ragged_all_to_all", lower_for_cuda(compute, *arguments).text)

    def test_transformer_engine(self):
        """Its parts, by stand-ins with their signatures; without the package there is a reason."""

        def token_dispatch(inp, routing_map, num_out_tokens, probs=None, align_size=None):
            tokens, experts = jnp.nonzero(routing_map.T, size=num_out_tokens)[::-1]
            return inp[tokens], None, (tokens, experts), None, routing_map.sum(0)

        def token_combine(inp, row_id_map, merging_probs=None, pad_offsets=None):
            tokens, experts = row_id_map
            weighted = inp.astype(jnp.float32) * merging_probs[tokens, experts][:, None]
            return jnp.zeros((len(merging_probs), inp.shape[1])).at[tokens].add(weighted)

        problem = problem_of(1, "float32")
        names = ("permutation", "dense")
        stand_ins = {f"transformer_engine.jax.{name}": types.ModuleType(name) for name in names}
        permutation, dense = stand_ins.values()
        permutation.token_dispatch, permutation.token_combine = token_dispatch, token_combine
        dense.grouped_dense = jax.lax.ragged_dot
        with unittest.mock.patch.dict("sys.modules", stand_ins):
            for operation in BENCHMARK.operations:
                found = results_of("TransformerEngine", operation, problem)
                assert_near(found, plain_results(operation, problem))
            with self.assertRaisesRegex(NotImplementedError, "includes the router"):
                results_of("TransformerEngine", "forward", problem_of(2))

    def test_a_wrong_result_is_no_result(self):
        problem = problem_of()
        ours = BY_NAME[OURS].start(case_of("forward"), problem)

        def wrong(problem, matmul):
            right = layer_baselines.sort_gather(problem, matmul)
            return lambda *arguments: right(*arguments).at[0].multiply(1.5)

        baseline = layer_providers.Baseline(
            "wrong", wrong, layer_providers._plain, for_several=False
        )
        with self.assertRaisesRegex(ArithmeticError, "differ from those of jax_ep by 0"):
            BENCHMARK.check(*baseline.start(case_of("forward"), problem), "wrong", ours)


class PartsTest(parameterized.TestCase):
    @parameterized.product(operation=["forward", "both"], weights=["bfloat16", "float32"])
    def test_the_parts_are_the_calls_of_the_layer(self, operation, weights):
        """Each has the operands and attributes of one custom call of the layer, and none is left."""
        problem = problem_of(2, weights, Shape(160, 32, 16, 2, 2))
        case = case_of(operation, weights, shape=problem.shape)
        values_of(problem)
        programs = []

        def lower(function, arguments, mesh, *_, **__):
            programs.append(lower_for_cuda(sharded(function, mesh), *arguments[0]))

        with (
            unittest.mock.patch.object(jax, "default_backend", lambda: "gpu"),
            unittest.mock.patch("jax_ep.bench.layer.passes.start_sharded", lower),
            unittest.mock.patch("jax_ep.bench.layer.parts.start_sharded", lower),
        ):
            BY_NAME[OURS].start(case, problem)
            for part in PARTS:
                if operation in part.operations and part.kind != "pass":
                    part.start(case, problem)
                    # The gradient of a redispatch has one, whose results nobody uses.
                    target = f"jax_ep.{part.target}.v1"
                    self.assertLen([c for c in programs[-1].calls if c.target == target], 1)
        layer, *parts = programs
        names = [p.target for p in PARTS if operation in p.operations and p.kind != "pass"]
        used = [part.call(name) for part, name in zip(parts, names, strict=True)]
        key = lambda call: (call.target, str(call.attributes), call.operands, call.results)
        self.assertCountEqual(map(key, used), map(key, layer.calls))

    def test_dense_matmuls_have_the_parts_sizes(self):
        problem = problem_of(shape=Shape(160, 32, 16, 2, 2))
        shapes = {}
        for dense in DENSE:
            started = dense.start(case_of("both", shape=problem.shape), problem)
            result = started.call(started.arguments[0])
            shapes[dense.name] = jax.tree.map(jnp.shape, result)
        rows, hidden, size = 320, 32, 16
        self.assertEqual(shapes["dense: SwiGLU"], (rows, size))
        gradients = (rows, 2 * size), (rows, size)
        self.assertEqual(shapes["dense: gradient of SwiGLU"], gradients)
        expected = [(rows, 2 * size), (rows, hidden), (rows, size), (rows, hidden)]
        expected += [(hidden, 2 * size), (size, hidden)]
        matmuls = {d.name for d in DENSE if d.is_matmul}
        self.assertEqual([shapes[name] for name in shapes if name in matmuls], expected)

    def test_the_values_are_those_of_the_layer(self):
        problem = problem_of()
        (values, _) = values_of(problem)
        out, x_bar, weights_bar, up_bar, _ = results_of(OURS, "both", problem)
        calls = Calls(problem, keep=True)
        on_rank = lambda f, *a: np.asarray(jax.jit(sharded(f, problem.mesh))(*a), np.float64)
        np.testing.assert_array_equal(on_rank(calls.combine, values.y, values.plan), out)
        gradient = on_rank(
            calls.weight_gradient, values.rows, values.pre_activation_bar, values.plan
        )
        np.testing.assert_array_equal(gradient, up_bar)
        combined = jax.jit(sharded(calls.combine_gradients, problem.mesh))(
            values.rows_bar, values.row_weights_bar, values.operands.x, values.plan
        )
        np.testing.assert_array_equal(np.asarray(combined[0], np.float64), x_bar)
        np.testing.assert_array_equal(np.asarray(combined[1], np.float64), weights_bar)


class CommandTest(parameterized.TestCase):
    def test_smoke(self):
        arguments = (
            "--weights",
            "float32",
            "--devices",
            "1",
            "--baselines",
            "torch",
            "TransformerEngine",
        )
        with unittest.mock.patch.dict("sys.modules", {"torch": None}):
            status, output, results = smoke("layer", *arguments)
        self.assertEqual(status, 0, output)
        self.assertEqual([c["operation"] for c in results["cases"]], ["forward", "both"])
        for record in results["cases"]:
            ours = record["measurements"][OURS]
            names = [p.name for p in (*PARTS, *DENSE) if record["operation"] in p.operations]
            parts = [record["measurements"][n] for n in names if n.startswith("part")]
            total = sum(part["rounds"][1]["mean"] for part in parts)
            self.assertAlmostEqual(ours["of_sum"] * total, ours["rounds"][1]["mean"])
            self.assertGreater(ours["of_dense_sum"], 0)
            self.assertGreater(ours["peak_gib"], 0)
            self.assertLen(ours["rounds"], SMOKE_ROUNDS)
        reasons = {gap["provider"]: gap["reason"] for gap in results["not_run"]}
        self.assertIn("ModuleNotFoundError", reasons["torch"])
        self.assertIn("transformer_engine", reasons["TransformerEngine"])
        self.assertIn("did not run in 2 of 2 cases: torch", output)
        self.assertEqual(results["missing"][0]["reason"], "it was not run")  # the plain layers

    @parameterized.parameters(
        ([], ["jax_ep", "part: up", "torch"], ["jax_ep Fp8Block128"]),
        (["--quantization"], ["jax_ep", "part: up", "torch", "jax_ep Fp8Block128"], []),
        (["--provider", "part: up"], ["part: up", "torch"], ["jax_ep"]),
    )
    def test_baselines_are_beside_named_providers(self, options, chosen, others):
        parser = argparse.ArgumentParser()
        harness.add_arguments(parser, BENCHMARK)
        arguments = parser.parse_args(["--baselines", "torch", "--devices", "1", *options])
        benchmark = copy.copy(BENCHMARK)
        with unittest.mock.patch.object(
            layer_benchmark, "copy_bytes_per_second", lambda nbytes: 1.0
        ):
            benchmark.prepare(arguments, {})
        names = [provider.name for provider in benchmark.chosen_providers(arguments)]
        self.assertContainsSubset(chosen, names)
        self.assertNoCommonElements(others, names)

    def test_quick_and_profile(self):
        with tempfile.TemporaryDirectory() as folder:
            arguments = ("--quick", "--passes", "forward", "--devices", "2", "--profile", folder)
            arguments += ("--domain-size", "1")
            status, _, results = smoke("layer", *arguments)
            traces = list(pathlib.Path(folder).rglob("perfetto_trace.json.gz"))
        self.assertEqual(status, 0)
        (record,) = results["cases"]
        self.assertEqual((record["variant"], record["num_ranks"]), ("bfloat16", 2))
        self.assertLen(record["measurements"][OURS]["rounds"], SMOKE_ROUNDS)
        self.assertLen(traces, 1)
        domains = record["measurements"][f"{OURS} domains of 1"]
        self.assertLen(domains["rounds"], SMOKE_ROUNDS)
        self.assertEqual(domains["facts"]["relative_differences"], [0.0])

    def test_choices(self):
        with self.assertRaises(SystemExit):
            run("layer", "--shapes", "unknown")
        with self.assertRaisesRegex(SystemExit, "--domain-size 3 does not divide 2 devices"):
            run("layer", "--smoke", "--devices", "2", "--domain-size", "3")
        status, output = run("layer")
        self.assertEqual(status, 2)
        self.assertIn("There is no GPU", output)

    def test_models(self):
        self.assertEqual(str(BENCHMARK.shapes[0]), "deepseek-v3, T=4096")
        self.assertLen(BENCHMARK.shapes, 4 * len(MODELS))
        self.assertEqual(Shape(4096, *MODELS["deepseek-v3"]).rows, 32768)


if __name__ == "__main__":
    absltest.main()
