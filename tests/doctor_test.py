"""The doctor: what it reports on this machine, and what it makes of other machines' facts."""

import contextlib
import io
import json
import unittest.mock

import testing  # noqa: F401  sets the number of devices
from absl.testing import absltest, parameterized

from jax_ep import doctor

CPU = {"platform": "cpu", "gpus": [], "implementation": "xla", "reason": "", "largest_error": 1e-7}
GPU = CPU | {"platform": "gpu", "gpus": [{"ordinal": 0}], "implementation": "cuda"}


class DoctorTest(parameterized.TestCase):
    @parameterized.parameters(
        (CPU, 2, "no GPU"),
        (CPU | {"gpus": [{"ordinal": 0}]}, 1, "JAX runs on cpu"),
        (CPU | {"largest_error": 0.1}, 1, "wrong by 0.1"),
        (CPU | {"largest_error": float("nan")}, 1, "wrong by nan"),
        (GPU, 0, "verified"),
        (GPU | {"implementation": "xla", "reason": "because"}, 1, "because"),
        (GPU | {"error": "RuntimeError: no kernels"}, 1, "no kernels"),
    )
    def test_verdicts(self, facts, exit_status, text):
        verdict = doctor.judge(facts)
        self.assertEqual(verdict.exit_status, exit_status)
        self.assertIn(text, verdict.summary)

    def test_a_failing_cuda_layer_names_the_way_round(self):
        verdict = doctor.judge(GPU | {"error": "RuntimeError: no kernels"})
        self.assertIn("JAX_EP_IMPLEMENTATION=xla", verdict.advice)

    def test_this_machine(self):
        facts = doctor.collect()
        self.assertLess(facts["largest_error"], 1e-5)
        for output in ([], ["--json"]):
            printed = io.StringIO()
            with (
                unittest.mock.patch("sys.argv", ["doctor", *output]),
                contextlib.redirect_stdout(printed),
            ):
                exit_status = doctor.main()
            self.assertEqual(exit_status, doctor.judge(facts).exit_status)
            self.assertIn("jaxlib", printed.getvalue())
        self.assertEqual(json.loads(printed.getvalue())["platform"], facts["platform"])


if __name__ == "__main__":
    absltest.main()
