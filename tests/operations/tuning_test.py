"""tune and use_tuning: what is measured, written, and used when programs are lowered for CUDA."""

from __future__ import annotations

import json
import pathlib
import tempfile
import unittest.mock
import warnings

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
import programs
from absl.testing import absltest, parameterized
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep import quant
from jax_ep._src.core import runtime
from jax_ep._src.transfer import tune, tuning

GPU = "a GPU"
RANKS, TOKENS, HIDDEN, EXPERTS, TOP_K = 4, 6, 128, 8, 2
SIZES = tune.Sizes(TOKENS, HIDDEN, EXPERTS, TOP_K)


def problem(quantization=None, domain_size=None):
    mesh = testing.expert_mesh(RANKS)
    return tune.Problem(mesh, SIZES, jnp.dtype("bfloat16"), quantization, domain_size)


def call(operation, row_bytes=2 * HIDDEN, domain_size=None):
    return tuning.Call(operation, RANKS, TOKENS, row_bytes, TOP_K, EXPERTS, domain_size)


def lowered(*, num_sms=None, domain_size=None):
    """The operations and numbers of SMs of dispatch, combine and their gradients."""

    def layer(x, ids, weights):
        sent = jax_ep.dispatch(
            *(x, ids, weights),
            num_experts=EXPERTS,
            axis_name="expert",
            num_sms=num_sms,
            nvlink_domain_size=domain_size,
        )
        y = jax_ep.combine(sent.rows, sent.plan, sent.row_weights, num_sms=num_sms)
        return y.astype(jnp.float32)

    spec = P("expert")
    mapped = jax.shard_map(layer, mesh=testing.expert_mesh(RANKS), in_specs=spec, out_specs=spec)
    rows = RANKS * TOKENS
    program = programs.lower_for_cuda(
        jax.value_and_grad(lambda *arguments: mapped(*arguments).sum(), (0, 2)),
        programs.struct((rows, HIDDEN), jnp.bfloat16),
        programs.struct((rows, TOP_K), jnp.int32),
        programs.struct((rows, TOP_K)),
    )
    return [(found.target.split(".")[1], found.attributes["num_sms"][1]) for found in program.calls]


class TuningTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        folder = self.enterContext(tempfile.TemporaryDirectory())
        self.file = pathlib.Path(folder, "tuning.json")
        self.enterContext(unittest.mock.patch.object(runtime, "gpu_kind", lambda: GPU))
        self.addCleanup(jax_ep.use_tuning, None)
        jax_ep.use_tuning(None)


class UseTest(TuningTest):
    def write(self, **num_sms):
        calls = {call(name): (number, {number: 1.0}) for name, number in num_sms.items()}
        tuning.write(self.file, GPU, calls)

    def test_calls_of_the_shape_have_its_numbers(self):
        self.write(dispatch=11, combine=22)
        self.assertEqual({number for _, number in lowered()}, {0})
        jax_ep.use_tuning(self.file)
        found = lowered()
        # In the backward pass combine's cotangents are redispatched, which is not tuned.
        self.assertCountEqual(
            found, [("dispatch", 11), ("combine", 22), ("redispatch", 0), ("combine", 22)]
        )
        self.assertEqual({number for _, number in lowered(num_sms=5)}, {5})
        self.assertEqual({number for _, number in lowered(domain_size=2)}, {0})

    def test_another_gpu_is_not_tuned(self):
        tuning.write(self.file, "another GPU", {call("dispatch"): (11, {11: 1.0})})
        jax_ep.use_tuning(self.file)
        self.assertEqual(tuning.tuned_sms(call("dispatch")), 0)

    def test_the_variable_names_a_file(self):
        self.write(dispatch=11)
        with (
            unittest.mock.patch.object(tuning, "_used", None),
            unittest.mock.patch.dict("os.environ", {tuning.VARIABLE: str(self.file)}),
        ):
            self.assertEqual(tuning.tuned_sms(call("dispatch")), 11)

    def test_a_file_keeps_other_calls(self):
        self.write(dispatch=11, combine=22)
        self.write(dispatch=33)
        tuning.write(self.file, "another GPU", {call("dispatch"): (44, {44: 1.0})})
        found = tuning.read(self.file)
        self.assertEqual(found[GPU], {call("dispatch"): 33, call("combine"): 22})
        self.assertEqual(found["another GPU"], {call("dispatch"): 44})
        self.assertLen(list(self.file.parent.iterdir()), 1)

    def test_another_version_is_not_used(self):
        self.write(dispatch=11)
        content = json.loads(self.file.read_text()) | {"jax_ep": "0.0.1"}
        self.file.write_text(json.dumps(content))
        with self.assertWarnsRegex(UserWarning, r"written by jax_ep 0\.0\.1"):
            jax_ep.use_tuning(self.file)
        self.assertEqual(tuning.tuned_sms(call("dispatch")), 0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.write(combine=22)  # begins anew
        self.assertEqual(tuning.read(self.file), {GPU: {call("combine"): 22}})

    @parameterized.parameters("", "[]", '{"jax_ep": "1"}', '{"jax_ep": "1", "gpus": {"a": [{}]}}')
    def test_another_file_is_an_error(self, content):
        self.file.write_text(content)
        with self.assertRaisesRegex(jax_ep.ArgumentError, "cannot be read as what jax_ep.tune"):
            jax_ep.use_tuning(self.file)


class TuneTest(TuningTest):
    def test_the_least_number_that_is_fast_enough(self):
        self.assertEqual(tune.best({16: 2.0, 48: 1.009, 64: 1.0, 0: 1.005}), 48)
        self.assertEqual(tune.best({16: 2.0, 48: 1.5, 0: 1.0}), 0)

    def test_candidates(self):
        self.assertEqual(tune.candidates(132), (11, 22, 33, 44, 66, 88, 110, 0))

    def test_measures_what_calls_are_looked_up_by(self):
        numbers = {"dispatch": 3, "redispatch": 5, "combine": 0}

        def seconds(problem, operation, num_sms):
            return 1e-6 if num_sms == numbers[operation] else 2e-6

        with (
            unittest.mock.patch.object(tune.Problem, "seconds", seconds),
            unittest.mock.patch.object(tune, "candidates", lambda num_sms: (3, 5, 0)),
        ):
            mesh = testing.expert_mesh(RANKS)
            times = jax_ep.tune(self.file, *SIZES, mesh=mesh)
        self.assertEqual(times["dispatch"], {3: 1.0, 5: 2.0, 0: 2.0})
        jax_ep.use_tuning(self.file)
        self.assertCountEqual(
            lowered(), [("dispatch", 3), ("combine", 0), ("redispatch", 5), ("combine", 0)]
        )

    @parameterized.parameters((None, None), (quant.Fp8Block128(), None), (None, 2))
    def test_times_every_operation(self, quantization, domain_size):
        with (
            unittest.mock.patch.object(tune, "CHAINED_OF_FEW", 2),
            unittest.mock.patch.object(tune, "REPETITIONS", 2),
        ):
            measured = tune.measure(problem(quantization, domain_size), (4, 0))
        bytes_sent = HIDDEN + 4 if quantization else 2 * HIDDEN
        self.assertEqual(
            set(measured),
            {
                call("dispatch", bytes_sent, domain_size),
                call("redispatch", bytes_sent, domain_size),
                call("combine", 2 * HIDDEN, domain_size),
            },
        )
        for num_sms, times in measured.values():
            self.assertIn(num_sms, times)
            self.assertEqual(set(times), {4, 0})
            self.assertGreater(min(times.values()), 0)

    def test_nothing_is_dropped(self):
        given = problem()
        sent = given.program("dispatch", 0)(*given.arguments["dispatch"])
        self.assertTrue(np.all(sent.plan.kept))


if __name__ == "__main__":
    absltest.main()
