"""Every routine against values obtained elsewhere; `reference.json` holds data, values, tolerances and origins."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fairtrial import stats

CASES: list[dict[str, Any]] = json.loads(Path(__file__).with_name("reference.json").read_text(encoding="utf-8"))


def ends(interval: stats.Interval | stats.Undefined | None) -> list[float]:
    assert isinstance(interval, stats.Interval)
    return [interval.low, interval.high]


def paired_figures(a: list[float], b: list[float]) -> dict[str, Any]:
    one, other = stats.sem(a), stats.sem(b)
    assert isinstance(one, float)
    assert isinstance(other, float)
    # An equivalence margin of nought turns one side of the paired t test into its one-sided p.
    one_sided = stats.noninferiority(a, b, margin=0.0).p_value
    assert one_sided is not None
    return {
        "diff": stats.paired_difference(a, b).difference,
        "se": stats.paired_se(a, b),
        "unpaired_se": float(np.hypot(one, other)),
        "t_p": 2 * one_sided,
    }


def repeats_figures(m: list[list[float]]) -> dict[str, Any]:
    split = stats.variance_split(m)
    flat = stats.sem([score for row in m for score in row])
    return {
        "mean": split.mean,
        "se": split.se,
        "within": split.within,
        "between": split.between,
        "wrong_flat_se": flat,
    }


def sample_size(delta: float, omega2: float, sa2: float, sb2: float, K: int = 1) -> int | stats.Undefined:
    return stats.sample_size(delta, omega2=omega2, sigma_a2=sa2, sigma_b2=sb2, repeats_a=K, repeats_b=K)


def mde(n: int, omega2: float, sa2: float, sb2: float, K: int) -> float | stats.Undefined:
    return stats.mde(n, omega2=omega2, sigma_a2=sa2, sigma_b2=sb2, repeats_a=K, repeats_b=K)


def prediction_powered(**given: Any) -> dict[str, Any]:
    found = stats.prediction_powered_mean(**given)
    return {"theta": found.estimate, "se": found.se, "ci": ends(found.interval)}


def rogan_gladen(**given: Any) -> dict[str, Any]:
    found = stats.rogan_gladen(**given)
    return {"theta": found.estimate, "se": found.se}


def sign_flip(d: list[float]) -> float:
    found = stats.signflip(d)
    assert isinstance(found, stats.SignFlip)
    assert found.exact
    return found.p_value


ROUTINES: dict[str, Callable[..., Any]] = {
    "wilson95": lambda k, n: ends(stats.wilson(k, n)),
    "beta_uniform95": lambda k, n: ends(stats.beta_uniform(k, n)),
    "clopper_pearson95": lambda k, n: ends(stats.clopper_pearson(k, n)),
    "sem": lambda x: stats.sem(x),
    "clustered_se": lambda y, cluster, correction: stats.clustered_se(y, cluster, correction=correction),
    "paired_se": paired_figures,
    "mcnemar_exact": lambda b, c: stats.mcnemar_exact(b, c),
    "mcnemar_midp": lambda b, c: stats.mcnemar_midp(b, c),
    "bonett_price95": lambda b, c, n: ends(stats.bonett_price(b, c, n)),
    "wilson_clustered95": lambda y, cluster: ends(stats.mean_interval(y, clusters=cluster).interval),
    "signflip_exact_p": sign_flip,
    "bootstrap_bca95": lambda x: ends(stats.bca_interval(x)),
    "pass_at_k": lambda n, c, k: stats.pass_at_k(n, c, k),
    "pass_hat_k": lambda n, c, k: stats.pass_hat_k(n, c, k),
    "holm": lambda p: stats.holm(p).tolist(),
    "bh": lambda p: stats.benjamini_hochberg(p).tolist(),
    "bh_count": lambda p, q: int(np.count_nonzero(stats.benjamini_hochberg(p) <= q)),
    "sample_size": sample_size,
    "mde": mde,
    "epochs": repeats_figures,
    "eprocess_pairs": lambda **n: stats.BettingMartingale([1] * n["w"] + [-1] * n["l"], bounds=(-1, 1)).capital(0.0),
    "betting_cs95": lambda k, n: ends(stats.BettingMartingale([1] * k + [0] * (n - k)).interval()),
    "cohen_kappa": lambda table: stats.cohen_kappa_table(table),
    "fleiss_kappa": lambda table: stats.fleiss_kappa(table),
    "krippendorff": lambda ratings: {
        measurement: stats.krippendorff_alpha(ratings, measurement=measurement)
        for measurement in ("nominal", "ordinal", "interval", "ratio")
    },
    "ppi_mean": prediction_powered,
    "rogan_gladen": rogan_gladen,
    "noninferiority_p": lambda a, b, margin: stats.noninferiority(a, b, margin=margin).p_value,
}


def agrees(found: Any, expected: Any, tolerance: float) -> bool:
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(agrees(found[k], expected[k], tolerance) for k in expected)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(agrees, found, expected, [tolerance] * len(expected)))
    return isinstance(found, int | float) and abs(found - expected) <= tolerance


@pytest.mark.parametrize("case", CASES, ids=[f"{i:02d}-{case['name']}" for i, case in enumerate(CASES)])
def test_every_reference_value_is_reached_at_its_tolerance(case: dict[str, Any]) -> None:
    found = ROUTINES[case["name"]](**case["input"])
    assert agrees(found, case["expected"], case["abs_tol"]), (found, case["expected"])


def test_no_reference_case_is_missing() -> None:
    assert len(CASES) == 49
    assert {case["name"] for case in CASES} == set(ROUTINES)
    assert all(case["source"] for case in CASES)
