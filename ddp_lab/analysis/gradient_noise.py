"""Gradient noise: how much the ranks' gradients differ from their mean, and the batch size at which that matters.

[Note: gradient noise scale]
Each rank's gradient g_i is a mean over its own batch of b samples; their mean ḡ is one over n·b. McCandlish et al.
2018, "An Empirical Model of Large-Batch Training", appendix A.1, take norms at two batch sizes to get unbiased
estimates of the true gradient's squared norm and of the noise (B in batches of a rank: B_small = 1, B_big = n):
    |G|² = (n·|ḡ|² - mean|g_i|²) / (n - 1)        S = (mean|g_i|² - |ḡ|²) / (1 - 1/n)
The simple noise scale S / |G|² is then in batches of a rank; times b, in samples. A batch much smaller than it learns
about as much per sample as a tiny one; a much larger one wastes samples. Single steps tell little, and |G|² may come
out negative: average S and |G|² over steps first, then divide. With a comm hook that loses accuracy ḡ is not the mean.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["noise_scale", "signal_and_noise"]

_Floats = npt.NDArray[np.float64]


def signal_and_noise(before: _Floats, after: _Floats) -> tuple[_Floats, _Floats]:
    """|G|² and S of each step; NaN with fewer than two ranks.

    Args:
        before: norms of the ranks' gradients, shape [..., ranks]; NaN for ranks that had none.
        after: norms of their average, shape [...].
    """
    known = np.isfinite(before)
    ranks = known.sum(axis=-1)
    n = np.where(ranks > 1, ranks, np.nan)
    small = np.where(known, before, 0.0) ** 2
    mean = small.sum(axis=-1) / n
    big = after**2
    return (n * big - mean) / (n - 1), (mean - big) / (1 - 1 / n)


def noise_scale(signal: _Floats, noise: _Floats) -> float:
    """S / |G|² of averages over steps, in batches of a rank; NaN if no gradient stands out of the noise."""
    usable = np.isfinite(signal) & np.isfinite(noise)
    if not usable.any():
        return float("nan")
    mean = float(signal[usable].mean())
    return float(noise[usable].mean()) / mean if mean > 0 else float("nan")
