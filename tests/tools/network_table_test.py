"""The times that a network allows: the table of the docs, and its averages against random routing."""

from __future__ import annotations

import json

import numpy as np
import tool
from absl.testing import absltest, parameterized

network_table = tool.load("network_table")


class TableTest(parameterized.TestCase):
    def test_the_docs_have_it(self):
        """`python tools/docs/network_table.py` writes it."""
        self.assertEqual(json.loads(network_table.PATH.read_text()), network_table.table())

    @parameterized.parameters(2, 4, 8, 32)
    def test_averages_are_those_of_random_routing(self, num_domains):
        rng = np.random.default_rng(0)
        scores = rng.random((20000, network_table.NUM_EXPERTS))
        ids = np.argpartition(scores, network_table.TOP_K, axis=1)[:, : network_table.TOP_K]
        domains = ids // (network_table.NUM_EXPERTS // num_domains)
        hit = np.zeros((len(ids), num_domains), bool)
        np.put_along_axis(hit, domains, True, 1)
        self.assertAlmostEqual(
            hit[:, 1:].sum(1).mean(), network_table.remote_domains(num_domains), delta=0.03
        )


if __name__ == "__main__":
    absltest.main()
