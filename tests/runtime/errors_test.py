"""docs/reference/errors.md is complete, true of the sources, and every message of Python on it is produced here."""

from __future__ import annotations

import re

import testing  # isort: skip  # noqa: F401  sets the devices

import jax.numpy as jnp
import programs
from absl.testing import absltest
from errors import (
    checkpoints,
    experts,
    fallbacks,
    layers,
    matmul,
    quantization,
    quantized_experts,
    runtime,
    transfer,
)
from errors.common import ROW, X
from errors.page import (
    BUILTIN,
    anonymous,
    compiled_templates,
    documented,
    python_templates,
    sections,
    to_regex,
)

import jax_ep
from jax_ep import quant

TOPICS = (
    transfer,
    matmul,
    experts,
    layers,
    quantization,
    quantized_experts,
    runtime,
    checkpoints,
)


def merged(tables):
    """Class -> the calls of all tables that raise it."""
    producers = {}
    for table in tables:
        for name, calls in table.items():
            producers.setdefault(name, []).extend(calls)
    return producers


PRODUCERS = merged(topic.PRODUCERS for topic in TOPICS)


class HostTest(absltest.TestCase):
    def test_check_says_why_the_host_has_ended_the_calls(self):
        message = "jax_ep: the host has ended the calls of this generation: a reason"
        assert jax_ep._src.core.runtime._ffi.post_report(0, 0, "host", 0, message)
        with self.assertRaisesRegex(jax_ep.Error, message):
            jax_ep.check()
        jax_ep.check()


class PageTest(absltest.TestCase):
    def test_python_messages_are_on_the_page(self):
        for name, templates in python_templates().items():
            with self.subTest(name):
                self.assertCountEqual(templates, [anonymous(t) for t in documented()[name]])

    def test_compiled_messages_are_on_the_page(self):
        section = sections()["Messages of the compiled module"]
        on_page = {anonymous(t) for t in re.findall(r"\| `([^`]*)` \|$", section, re.MULTILINE)}
        self.assertSetEqual(compiled_templates(), on_page)

    def test_every_class_has_its_section_and_builtin(self):
        for name, builtin in BUILTIN.items():
            self.assertIn(name, documented())
            self.assertTrue(issubclass(getattr(jax_ep, name), jax_ep.Error))
            self.assertTrue(issubclass(getattr(jax_ep, name), builtin))


class ProducedTest(absltest.TestCase):
    def test_every_message_is_produced(self):
        self.assertCountEqual(PRODUCERS, BUILTIN)
        for name, producers in PRODUCERS.items():
            missing = {anonymous(template) for template in documented()[name]}
            for index, produce in enumerate(producers):
                with self.subTest(f"{name} {index}"):
                    with self.assertRaises(getattr(jax_ep, name)) as caught:
                        produce()
                    self.assertIsInstance(caught.exception, BUILTIN[name])
                    text = str(caught.exception)
                    fitting = [t for t in documented()[name] if to_regex(t).fullmatch(text)]
                    self.assertNotEmpty(fitting, text)
                    missing -= {anonymous(template) for template in fitting}
            with self.subTest(f"all of {name}"):
                self.assertEmpty(missing)

    def test_float_dtypes_have_their_advice(self):
        for produce, advice in (
            (
                lambda: layers.layer(param_dtype=jnp.float8_e4m3fn),
                r"MoE: param_dtype=float8_e4m3fn; .*quantization=jax_ep.quant.Recipe\(\)\.$",
            ),
            (
                lambda: quant.dequantize(quant.quantize(X, ROW), jnp.int8),
                r"quant.dequantize: dtype=int8; .*jnp.float32 for all bits of the products\.$",
            ),
        ):
            with self.assertRaisesRegex(jax_ep.DtypeError, advice):
                produce()

    def test_peer_timeout_has_its_parts(self):
        with self.assertRaises(jax_ep.PeerTimeoutError) as caught:
            runtime.fail()
        error = caught.exception
        self.assertEqual(
            (error.rank, error.peer, error.phase, error.sequence_number),
            (1, 2, "dispatch.entry", 3),
        )
        jax_ep.check()  # said once

    def test_reasons(self):
        """The table of reasons: each is given, in a warning, by what it says."""
        reasons = re.findall(r"^\| `([^`]*)` \| ", sections()["Warnings"], re.MULTILINE)
        patterns = [to_regex(reason) for reason in reasons]
        with programs.fallback_warnings() as messages:
            fallbacks.each_transfer_fallback()
            fallbacks.each_quantized_fallback()
        template, *_ = documented()["Warnings"]
        for pattern in patterns:
            self.assertTrue(any(pattern.search(message) for message in messages), pattern)
        for message in messages:
            self.assertRegex(message, to_regex(template))
            self.assertTrue(any(pattern.search(message) for pattern in patterns), message)


if __name__ == "__main__":
    absltest.main()
