"""Text as tokens, by the tokenizer of a checkpoint if it can be read."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np


class Text:
    """Converts by tokenizer.json and the package tokenizers, if both are there."""

    def __init__(self, folder: pathlib.Path):
        self.tokenizer: Any = None
        path = folder / "tokenizer.json"
        if path.exists():
            try:
                import tokenizers
            except ImportError:
                print(
                    "tokenizer.json is not used: for text, pip install tokenizers", file=sys.stderr
                )
            else:
                self.tokenizer = tokenizers.Tokenizer.from_file(str(path))

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a prompt, which is a list of ids if there is no tokenizer."""
        if self.tokenizer is not None:
            return list(self.tokenizer.encode(text).ids)
        try:
            return [int(word) for word in text.split()]
        except ValueError:
            raise SystemExit(
                f"the prompt {text!r} is text; expected token ids, such as '1 2 3', as there is no "
                "tokenizer.json or the package tokenizers is not installed."
            ) from None

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text, or the ids."""
        if self.tokenizer is not None:
            return str(self.tokenizer.decode(list(tokens)))
        return " ".join(map(str, tokens))

    def corpus(self, text: bytes) -> np.ndarray:
        """Returns the tokens of a training text, which are its bytes if there is no tokenizer."""
        if self.tokenizer is not None:
            return np.array(self.tokenizer.encode(text.decode(errors="replace")).ids)
        return np.frombuffer(text, np.uint8)
