"""README's Python blocks run as a reader types them: each in a new interpreter, with no setting but its own."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
import tempfile

from absl.testing import absltest, parameterized

README = pathlib.Path(__file__).parents[2] / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
# Settings that the tests make for themselves, or a developer has.
SETTINGS = ("JAX_", "XLA_")


class ReadmeTest(parameterized.TestCase):
    def test_there_are_blocks(self) -> None:
        self.assertNotEmpty(BLOCKS)

    def test_is_read_in_a_minute_or_two(self) -> None:
        self.assertLess(len(README.read_text().split()), 1000)

    @parameterized.parameters(*((block,) for block in BLOCKS))
    def test_block_runs(self, source: str) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith(SETTINGS)}
        with tempfile.TemporaryDirectory() as folder:
            program = pathlib.Path(folder) / "typed.py"
            program.write_text(source)
            result = subprocess.run(
                [sys.executable, program],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=600,
            )
        self.assertEqual(result.returncode, 0, f"{source}\n{result.stdout}\n{result.stderr}")


if __name__ == "__main__":
    absltest.main()
