"""When a page will be used again: a hazard of its age and nine features, learned as it happens. Pure.

The hazard of class c in age bucket j is 1 - exp(-base[c][j] e^z): a table for the shape over age (proportional hazards,
Cox 1972), a sum z of nine weights for what else is known (steps as in AdaGrad, Duchi et al. 2011). Nothing is learned
from the future: an interval that hasn't ended counts as far as it got.

What it is worth to keep a page is the best rate of hits per second that any time of keeping it gives: the index of a
bandit with a falling or rising rate (Gittins 1979).
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

KINDS, BUCKETS, AGES = 4, 8, 32
CLASSES = KINDS * BUCKETS  # of kind and gap bucket
NAMES: Final = ("constant", "uses", "gap", "blocks", "created", "output", "turn", "behind", "followers")
FEATURES = len(NAMES)
CONSTANT, USES, GAP, CHAIN, CREATED, OUTPUT, TURN, BEHIND, FOLLOWERS = range(FEATURES)

EDGES: Floats = np.concatenate([[0.0], 2.0 * 1.5 ** np.arange(AGES - 1)])  # s, where each age bucket begins
WIDTHS: Floats = np.diff(np.append(EDGES, EDGES[-1] * 1.5))  # s
Z_MAX, Z_STEP = 5.0, 0.5
MOST_RATE = 0.5  # share of a page's events that is learned from
CHAIN_MEMORY = 1 / 256
Z_LEVELS = int(2 * Z_MAX / Z_STEP) + 1


def steps(low: float, factor: float) -> Floats:
    """The lower edges of feature buckets 1 to 7; what is below is bucket 0."""
    edges: Floats = np.array([low * factor**i for i in range(BUCKETS - 1)], np.float64)
    return edges


USES_EDGES = steps(2, 1.7)
GAP_EDGES = steps(4, 3.2)  # s
CHAIN_EDGES = steps(4, 2.2)  # pages
CREATED_EDGES = steps(2, 2.2)  # pages
OUTPUT_EDGES = steps(4, 3.2)  # tokens
BEHIND_EDGES = steps(2, 2.2)  # pages
TURN_EDGES = steps(2, 1.7)


def bucket(edges: Floats, x: float) -> int:
    """Which feature bucket a number falls in."""
    return int(edges.searchsorted(x, "right"))


def ages(seconds: Floats) -> Ints:
    """Age bucket of each."""
    return np.maximum(EDGES.searchsorted(seconds, "right") - 1, 0)


class ReuseModel:
    """The weights, the table over age and the index made of both. Owned by one policy.

    Pages of one request tell much the same, so an average one counts as `per_request` of them, however long.
    """

    def __init__(
        self,
        per_request: float = 12.0,
        step: float = 0.007,
        shrink: float = 8.0,
        half_life: float = 20_000.0,
        period: float = 256.0,
        prior: float = 0.05,
    ) -> None:
        self._per_request, self._step, self._shrink = per_request, step, shrink
        self._rate = MOST_RATE
        self._chain = 0.0  # pages of a request, on average
        self._half_life, self._period, self._prior = half_life, period, prior
        self.weights: Floats = np.zeros(KINDS * FEATURES * BUCKETS)
        self._power: Floats = np.zeros_like(self.weights)  # decayed sum of squared errors
        self._hits: Floats = np.zeros((CLASSES, AGES))
        self._at_risk: Floats = np.zeros((CLASSES, AGES))
        self._since = 0.0  # hits since the last rebuild
        self.base: Floats = np.zeros((CLASSES, AGES))
        self.index: npt.NDArray[np.float64] = np.zeros(CLASSES * Z_LEVELS * AGES)
        self._rebuild()

    def requested(self, pages: int) -> None:
        """A request had a chain of so many."""
        self._chain += (pages - self._chain) * (CHAIN_MEMORY if self._chain else 1.0)
        self._rate = min(MOST_RATE, self._per_request / self._chain)

    def learn(self, features: Ints, classes: Ints, age: Ints, mass: Floats, hits: int) -> None:
        """From n events, the first `hits` of them reuses, the others ages reached without one.

        `features` int [n, 9] into `weights`; `classes`, `age` int [n]; `mass` float [n], pages.
        """
        z = np.clip(self.weights[features].sum(axis=1), -Z_MAX, Z_MAX)
        risk = np.exp(z)
        mass = mass * self._rate
        cells = classes * AGES + age
        self._hits += _sums(cells[:hits], mass[:hits], self._hits.shape)
        self._at_risk += _sums(cells[hits:], (mass * risk)[hits:], self._at_risk.shape)
        before = cells.copy()
        before[hits:] -= 1  # the bucket that was got through
        expected = self.base.ravel()[before] * risk
        error = np.maximum(1.0 - expected, 0.0)
        error[hits:] = -np.minimum(expected[hits:], 1.0)
        error[hits:][age[hits:] == 0] = 0.0
        expected[hits:][age[hits:] == 0] = 0.0
        self._descend(features, error, expected, mass)
        self._since += float(mass[:hits].sum())
        if self._since >= self._period:
            self._fade()
            self._rebuild()

    def _descend(self, features: Ints, error: Floats, slope: Floats, mass: Floats) -> None:
        """One step for all events, about as far as the steps that each would make after the other.

        `slope`: how much an event's error falls by for each 1 that z rises by. As all nine weights move, that damps.
        """
        at = features.ravel()
        size = len(self.weights)
        count = np.bincount(at, np.repeat(mass * (error != 0), FEATURES), size)
        push = np.bincount(at, np.repeat(mass * error, FEATURES), size)
        power = np.bincount(at, np.repeat(mass * error**2, FEATURES), size)
        curve = np.bincount(at, np.repeat(mass * slope, FEATURES), size)
        old = self._power * 0.9999**count
        rate = self._step * 2.0 / (np.sqrt(old + 1.0) + np.sqrt(old + power + 1.0))
        self.weights += rate * push / (1.0 + rate * FEATURES * curve)
        self._power = old + power

    def _fade(self) -> None:
        keep = 0.5 ** (self._since / self._half_life)
        self._hits *= keep
        self._at_risk *= keep
        self._since = 0.0

    def _rebuild(self) -> None:
        """The table, each class leaning on its kind and each kind on all, and the index."""
        hits, risk, shrink = self._hits, self._at_risk, self._shrink
        all_ = (hits.sum(axis=0) + shrink * self._prior) / (risk.sum(axis=0) + shrink)
        by_kind = (KINDS, BUCKETS, AGES)
        kind = (hits.reshape(by_kind).sum(axis=1) + shrink * all_) / (
            risk.reshape(by_kind).sum(axis=1) + shrink
        )
        self.base = (hits + shrink * np.repeat(kind, BUCKETS, axis=0)) / (risk + shrink)
        z = np.arange(-Z_MAX, Z_MAX + Z_STEP / 2, Z_STEP)
        hazard = 1.0 - np.exp(-self.base[:, None, :] * np.exp(z)[:, None])
        self.index = best_rates(hazard.reshape(-1, AGES)).ravel()


def best_rates(hazard: Floats) -> Floats:
    """The index: float [n, 32] of hazards [n, 32], hits per second when kept from each age on for the best time."""
    turned = np.ascontiguousarray(hazard.T)  # [age, n]
    hits = np.zeros_like(turned)  # of keeping from age j to the end of k: [k, n]
    seconds = np.zeros_like(turned)
    best = np.empty_like(turned)
    for j in range(AGES - 1, -1, -1):
        h = turned[j]
        hits[j:] *= 1.0 - h
        hits[j:] += h
        seconds[j:] *= 1.0 - h
        seconds[j:] += WIDTHS[j] * (1.0 - h / 2.0)
        best[j] = (hits[j:] / seconds[j:]).max(axis=0)
    return np.ascontiguousarray(best.T)


def _sums(cells: Ints, mass: Floats, shape: tuple[int, ...]) -> Floats:
    sums: Floats = np.bincount(cells, mass, shape[0] * shape[1]).astype(np.float64)
    return sums.reshape(shape)
