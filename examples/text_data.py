"""Real text that every machine has: the source of Python's standard library, as bytes.

Also the n-gram models that a language model has to beat.
"""

from __future__ import annotations

import pathlib
import sysconfig
import zlib
from typing import NamedTuple

import numpy as np

VOCABULARY = 256
EXCLUDED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class Corpus(NamedTuple):
    """The text, split by file.

    Attributes:
      training: uint8[N], the training files one after another.
      held_out: uint8[M], likewise; about one file in ten.
      num_files: how many files there are in both together.
    """

    training: np.ndarray
    held_out: np.ndarray
    num_files: int


def standard_library() -> Corpus:
    """Python's own library. The split hangs on file names alone, so it is always the same."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    names = sorted(
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if not EXCLUDED_FOLDERS & set(path.relative_to(root).parts)
    )
    if not names:
        raise FileNotFoundError(f"no Python source in {root}: is the standard library zipped?")
    texts: dict[bool, list[bytes]] = {False: [], True: []}
    for name in names:
        is_held_out = zlib.crc32(name.encode()) % 10 == 0
        texts[is_held_out].append((root / name).read_bytes())
    training, held_out = (np.frombuffer(b"".join(texts[k]), np.uint8) for k in (False, True))
    return Corpus(training, held_out, len(names))


def batch(text: np.ndarray, step: int, *, seed: int, batch_size: int, length: int) -> np.ndarray:
    """Random windows of ``length + 1`` bytes: int32[batch_size, length + 1].

    They follow from (seed, step) alone, so that a resumed run sees the data that it would have.
    """
    starts = np.random.default_rng((seed, step)).integers(0, len(text) - length, batch_size)
    return text[starts[:, None] + np.arange(length + 1)].astype(np.int32)


def windows(text: np.ndarray, count: int, length: int) -> np.ndarray:
    """`count` windows of ``length + 1`` bytes, evenly spaced: int32[count, length + 1]."""
    starts = np.linspace(0, len(text) - length - 1, count).astype(np.int64)
    return text[starts[:, None] + np.arange(length + 1)].astype(np.int32)


def ngram_losses(training: np.ndarray, held_out: np.ndarray) -> dict[str, float]:
    """Mean cross-entropy, in nats a byte, of a bigram and a trigram model on windows of text.

    A model with n bytes of context counts as if it had seen `prior` more bytes, spread as the model
    with n - 1 bytes of context predicts. So rare contexts are no handicap.

    Args:
      training: uint8[N], the text to count in.
      held_out: int32[windows, length + 1]; the first byte of a window is not predicted.
    """
    prior = 5.0
    text = training.astype(np.int64)
    target = held_out[:, 1:].astype(np.int64)
    unigram = (np.bincount(text, minlength=VOCABULARY) + 1) / (len(text) + VOCABULARY)
    probability = unigram[target]
    losses: dict[str, float] = {}
    codes, context = text, np.zeros_like(target)
    for width, name in ((1, "bigram"), (2, "trigram")):
        size = VOCABULARY**width
        codes = codes[:-1] * VOCABULARY + text[width:]  # the byte and the `width` bytes before it
        counts = np.bincount(codes, minlength=size * VOCABULARY)
        totals = counts.reshape(size, VOCABULARY).sum(1)
        context = context + _shifted(held_out, width) * VOCABULARY ** (width - 1)
        predicted = counts[context * VOCABULARY + target] + prior * probability
        longer = predicted / (totals[context] + prior)
        # The first bytes of a window have less context than that.
        has_context = np.arange(target.shape[1]) >= width - 1
        probability = np.where(has_context, longer, probability)
        losses[name] = float(-np.log(probability).mean())
    return losses


def _shifted(held_out: np.ndarray, width: int) -> np.ndarray:
    """The byte `width` places before each target; 0 where the window has none."""
    before = np.zeros_like(held_out[:, 1:], np.int64)
    before[:, width - 1 :] = held_out[:, : held_out.shape[1] - width]
    return before
