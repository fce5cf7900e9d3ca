"""Which tokens go where, in numpy: random choices, and what follows from them."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from jax_ep.bench.cases import probabilities
from jax_ep.bench.transfer_cases import Shape


def choose_experts(shape: Shape, num_ranks: int, routing: str) -> np.ndarray:
    """int32[R, T, K], distinct experts for every token, the same in every run.

    Args:
      shape: how many tokens, experts and choices.
      num_ranks: R.
      routing: "balanced" (uniform) or "zipf" (the expert of rank r is drawn with probability
        proportional to r^-1.2, ranks in random order, the same for all tokens).
    """
    random = np.random.default_rng(0)
    kind = "multinomial" if routing == "balanced" else routing
    logits = np.log(probabilities(shape.experts, kind, random))
    ids = np.empty((num_ranks, shape.tokens, shape.choices), np.int32)
    for rank in range(num_ranks):  # not all at once, for memory
        # The largest of logits plus Gumbel noise are drawn without replacement.
        noisy = logits + random.gumbel(size=(shape.tokens, shape.experts))
        ids[rank] = np.argsort(-noisy, axis=1)[:, : shape.choices]
    return ids


@dataclasses.dataclass(frozen=True)
class Routes:
    """The choices of all ranks.

    A choice's index is (rank * T + token) * K + choice: its place in `topk_ids` flattened.

    Attributes:
      topk_ids: int32[R, T, K], the experts.
      num_experts: E; expert e lives on rank e // (E / R).
    """

    topk_ids: np.ndarray
    num_experts: int

    @property
    def num_ranks(self) -> int:
        """R."""
        return len(self.topk_ids)

    @property
    def destinations(self) -> np.ndarray:
        """int32[R, T, K], the rank of each choice's expert."""
        return self.topk_ids // (self.num_experts // self.num_ranks)

    @functools.cached_property
    def counts(self) -> np.ndarray:
        """int64[R, R], the rows that a rank (first) sends to another (second)."""
        sent = [np.bincount(d.ravel(), minlength=self.num_ranks) for d in self.destinations]
        return np.stack(sent)

    @property
    def recv_capacity(self) -> int:
        """The most rows that any rank receives: with it nothing is dropped."""
        return max(1, int(self.counts.sum(0).max()))

    @property
    def busiest_pairs(self) -> int:
        """De-duplicated remote rows: distinct (token, other rank) pairs, of the busiest rank.

        The busiest is the one with most rows out or in.
        """
        visited = self.destinations[..., None] == np.arange(self.num_ranks)
        pairs = visited.any(2).sum(1)
        np.fill_diagonal(pairs, 0)
        return int(max(pairs.sum(0).max(), pairs.sum(1).max()))

    @functools.cached_property
    def _by_expert(self) -> np.ndarray:
        """int64[R * T * K], indices of choices by (expert, rank, token, choice)."""
        return np.argsort(self.topk_ids.ravel(), kind="stable")

    def received(self, rank: int) -> np.ndarray:
        """int64[rows], the choice of each row that `rank` receives, in the order of dispatch."""
        ends = np.cumsum(self.counts.sum(0))
        return self._by_expert[ends[rank] - self.counts[:, rank].sum() : ends[rank]]

    def sent_tokens(self) -> np.ndarray:
        """int32[R, T * K], of each rank the token of every row that it sends, by expert."""
        by_expert = np.argsort(self.topk_ids.reshape(self.num_ranks, -1), axis=1, kind="stable")
        return (by_expert // self.topk_ids.shape[2]).astype(np.int32)
