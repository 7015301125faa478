"""Measures what prefill costs at each depth, from the steps that do it. Pure.

A step takes a seconds for each token and b for each pair of tokens that attention looks at: linear layers cost the same
at every position, attention in proportion to it. Both are fitted by least squares over the latest steps.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvtier.tier.policy.base import Costs

FORGET = 0.98  # of the weight of a step, at each later one: about 50 steps count
PRIOR = 1e-4  # weight of the double_pages that is taken for granted, beside the steps: it decides where all are alike
LARGEST = 1e9  # double_pages, where attention costs nothing that shows


class PrefillCosts:
    """Owned by the step loop."""

    def __init__(self, page_tokens: int, double_pages: float = Costs().double_pages) -> None:
        """`double_pages`: as long as steps of one kind only leave it open."""
        self._page_tokens = page_tokens
        self._double_tokens = double_pages * page_tokens
        self._tt = self._tp = self._pp = 0.0  # sums of tokens and pairs, squared and multiplied
        self._ts = self._ps = 0.0  # and with the seconds
        self.costs = Costs()

    def measure(self, rows: Iterable[tuple[int, int]], seconds: float) -> None:
        """A step computed rows (start, length) in so many seconds: of prefill mostly."""
        tokens = pairs = 0.0
        for start, length in rows:
            tokens += length
            pairs += length * (start + 0.5 * length)
        self._tt = FORGET * self._tt + tokens * tokens
        self._tp = FORGET * self._tp + tokens * pairs
        self._pp = FORGET * self._pp + pairs * pairs
        self._ts = FORGET * self._ts + tokens * seconds
        self._ps = FORGET * self._ps + pairs * seconds
        self.costs = self._fit()

    def _fit(self) -> Costs:
        weight = PRIOR * self._tt  # of (a - b x double_tokens)^2, beside (seconds - a x tokens - b x pairs)^2
        double = self._double_tokens
        tt, tp, pp = self._tt + weight, self._tp - weight * double, self._pp + weight * double * double
        determinant = tt * pp - tp * tp
        a = (self._ts * pp - self._ps * tp) / determinant
        b = (self._ps * tt - self._ts * tp) / determinant
        if a <= 0.0:  # what noise gives: all of it is attention's, or all is the layers'
            a, b = self._ts / self._tt, 0.0
        pages = LARGEST if b * self._page_tokens * LARGEST <= a else a / (b * self._page_tokens)
        return Costs(a * self._page_tokens, max(1.0, pages))
