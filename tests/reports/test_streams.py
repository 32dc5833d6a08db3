"""Files of a large run are written without loading the run into memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from fairtrial import open_store
from tests.reports.made import FAIL, PASS, TASK_ERROR, Made, made_report

pytestmark = [pytest.mark.measured, pytest.mark.long]  # Memory, which a neighbour does not change.

TRIALS = 100_000
LIMIT_MB = 40
"""17 were measured: a page of results at a time, and the numbers of all trials, from which intervals are made."""

CODE = """
import json, pathlib, resource, sys
from fairtrial import EvalReport, open_store
from fairtrial.reports.render import renderable
import fairtrial.reports.figures.figures

def resident(field):
    status = pathlib.Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(field + ":")) / 1024

store = open_store(sys.argv[1])
report = EvalReport(store, store.get_run("run0000001"))
next(iter(report.results))
before = resident("VmRSS")
report.export(sys.argv[2])
print(json.dumps({"grown_mb": resident("VmHWM") - before}))
"""


def trial(place: int, *_: Any) -> Made:
    return TASK_ERROR if place % 100 == 0 else FAIL if place % 4 == 0 else PASS


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    url = f"sqlite:///{tmp_path_factory.mktemp('big') / 'runs.db'}"
    store = open_store(url)
    made_report(lambda place, *_: Made(trial(place).value, trial(place).outcome, "r" * 500, "e" * 500, "x" * 2_000),
                samples=TRIALS, store=store)  # fmt: skip
    store.close()
    return url


@pytest.mark.parametrize("suffix", ["xml", "html", "md", "json"])
def test_a_run_of_100_000_results_is_not_held_in_memory(suffix: str, url: str, child: Any, tmp_path: Path) -> None:
    path = tmp_path / f"report.{suffix}"
    measured = json.loads(child(CODE, url, str(path)))
    assert measured["grown_mb"] < LIMIT_MB, measured
    if suffix == "xml":
        cases = failures = errors = 0
        for _, element in ElementTree.iterparse(path):
            cases += element.tag == "testcase"
            failures += element.tag == "failure"
            errors += element.tag == "error"
            element.clear()
        assert (cases, failures, errors) == (TRIALS, 24_000, 1_000)
        assert path.stat().st_size > LIMIT_MB * 2**20
    if suffix == "html":
        text = path.read_text(encoding="utf-8")
        assert "Trials: errors first, then trials that did not pass, then the others" in text
        assert "98,000 more are not shown here. fairtrial export" in text
        assert len(text) < 16_000_000  # 12 million characters of texts, and what surrounds them.
