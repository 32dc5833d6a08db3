"""Adjust p-values for multiple tests."""

import numpy as np

from fairtrial.stats._arrays import FloatArray, Values, as_values


def holm(p_values: Values) -> FloatArray:
    """Adjusted p-values that bound the chance of even one false alarm, whatever the dependence. Holm (1979).

    Sorted upwards, the i-th of m is max over j <= i of min(1, (m - j + 1) p_j). For several metrics or candidates,
    where one false alarm blocks a release.
    """
    p = _checked(p_values)
    order = np.argsort(p, kind="stable")
    steps = np.minimum(1.0, p[order] * np.arange(p.size, 0, -1))
    adjusted = np.empty_like(p)
    adjusted[order] = np.maximum.accumulate(steps)
    return adjusted


def benjamini_hochberg(p_values: Values) -> FloatArray:
    """Adjusted p-values that bound the share of false alarms among all alarms. Benjamini and Hochberg (1995).

    Sorted upwards, the i-th of m is min over j >= i of min(1, m p_j / j). For many slices, where a list is read
    through anyway. Valid for independent or positively dependent p-values.
    """
    p = _checked(p_values)
    order = np.argsort(p, kind="stable")[::-1]
    steps = np.minimum(1.0, p[order] * p.size / np.arange(p.size, 0, -1))
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum.accumulate(steps)
    return adjusted


def _checked(p_values: Values) -> FloatArray:
    p = as_values(p_values, "p_values")
    outside = p[(p < 0) | (p > 1)]
    if outside.size:
        raise ValueError(f"A p-value must be from 0 to 1 (got {outside[0]:g}).")
    return p
