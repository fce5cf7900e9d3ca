"""README's Python blocks run as they stand, each in a new interpreter with 8 CPU devices."""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

from absl.testing import absltest, parameterized

README = pathlib.Path(__file__).parents[2] / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)


class ReadmeTest(parameterized.TestCase):
    def test_there_are_blocks(self) -> None:
        self.assertNotEmpty(BLOCKS)

    @parameterized.parameters(*((block,) for block in BLOCKS))
    def test_block_runs(self, source: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            result = subprocess.run(
                [sys.executable, "-c", source],
                cwd=folder,
                env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"},
                capture_output=True,
                text=True,
                timeout=600,
            )
        self.assertEqual(result.returncode, 0, f"{source}\n{result.stdout}\n{result.stderr}")


if __name__ == "__main__":
    absltest.main()
