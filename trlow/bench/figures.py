"""Figures of samples: what a row says of its times, and how far two sets of times differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

GIGA = 1e9
# two-sided 95 % quantiles of Student's t by degrees of freedom
_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)
_NORMAL = 1.96


@dataclass(frozen=True, slots=True)
class Spread:
    """Over iterations, or in graph mode over launches; µs per collective."""

    median_us: float
    p5_us: float
    p95_us: float
    p99_us: float
    least_us: float
    cv: float  # standard deviation over mean


def spread(samples: Sequence[float]) -> Spread:
    """Figures of at least one sample."""
    values = np.asarray(samples, float)
    p5, median, p95, p99 = (float(value) for value in np.percentile(values, (5, 50, 95, 99)))
    mean = float(values.mean())
    return Spread(
        median, p5, p95, p99, float(values.min()), float(values.std()) / mean if mean else 0.0
    )


@dataclass(frozen=True, slots=True)
class Ratio:
    """Time of B over time of A, with its 95 % interval where there are samples enough."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def beyond_noise(self) -> bool | None:
        """Whether the interval leaves 1 out; None where there is none."""
        if self.low is None or self.high is None:
            return None
        return not self.low <= 1.0 <= self.high


def ratio(first: Sequence[float], second: Sequence[float]) -> Ratio:
    """Of the geometric means, by Welch's t on logarithms: rounds are the samples."""
    a, b = np.log(np.asarray(first, float)), np.log(np.asarray(second, float))
    difference = float(b.mean() - a.mean())
    if len(a) < 2 or len(b) < 2:
        return Ratio(math.exp(difference))
    parts = [float(one.var(ddof=1)) / len(one) for one in (a, b)]
    total = sum(parts)
    if total == 0:
        return Ratio(math.exp(difference), math.exp(difference), math.exp(difference))
    below = sum(part**2 / (len(one) - 1) for part, one in zip(parts, (a, b), strict=True))
    freedom = max(1, int(total**2 / below))
    quantile = _T[freedom - 1] if freedom <= len(_T) else _NORMAL
    half = quantile * math.sqrt(total)
    return Ratio(math.exp(difference), math.exp(difference - half), math.exp(difference + half))
