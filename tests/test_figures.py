"""The page of benchmarks has the figures of one commit and one machine, as they were measured."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.figures import figure
from tests.scripts import ROOT, load_script


def test_the_page_of_benchmarks_has_the_figures_that_were_measured_and_no_others() -> None:
    script = load_script("figures")
    page = script.PAGE.read_text(encoding="utf-8")
    assert script.rewritten(page) == page, "run scripts/figures --write"
    head, _, table = page.partition(script.MARK)
    lines = script.read(script.RESULTS)
    assert len({json.dumps([line["commit"], line["machine"]]) for line in lines}) == 1
    assert table.count("\n| ") == 1 + sum(len(line["figures"]) + ("failed" in line) for line in lines)
    commands = {line["benchmark"]: line["command"] for line in lines}
    assert [name for name in commands if not commands[name].startswith(script.BENCHMARKS[name])] == []
    assert {line["command"].split()[0] for line in lines} <= set(re.findall(r"^\| `(\w+\.py)", head, re.MULTILINE))


@pytest.fixture
def figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, in a project of its own with three benchmarks."""
    script = load_script("figures")
    (tmp_path / "benchmarks").mkdir()
    shutil.copy(ROOT / "benchmarks" / "figures.py", tmp_path / "benchmarks")
    give = "import sys\nfrom figures import figure\nsys.exit(not figure('calls', float(sys.argv[1]), 'x', at_most=2))\n"
    (tmp_path / "benchmarks" / "give.py").write_text(give)
    (tmp_path / "benchmarks" / "wait.py").write_text("import time\ntime.sleep(60)\n")
    names = {"fast": "give.py 1.5", "slow": "give.py 2.5", "broken": "give.py x", "late": "wait.py"}
    for name, value in {
        "ROOT": tmp_path, "RESULTS": tmp_path / "figures.jsonl", "HISTORY": tmp_path / "history.jsonl",
        "LOGS": tmp_path / "logs", "BENCHMARKS": names, "LIMITS": {"late": 0.05},
        "commit": lambda: "a" * 40, "busy_cores": lambda: 0.0,
    }.items():  # fmt: skip
        monkeypatch.setattr(script, name, value)
    return script


def test_a_benchmark_that_misses_its_target_is_kept_and_one_that_fails_is_tried_again(figures: Any) -> None:
    assert figures.main([]) == 1
    results = {line["benchmark"]: line for line in figures.read(figures.RESULTS)}
    assert list(results) == ["fast", "slow", "broken", "late"]
    assert [figures.state(line) for line in results.values()][:2] == ["1 figures", "1 figures, 1 missed"]
    assert "could not convert string to float" in results["broken"]["failed"]
    assert results["late"]["failed"] == "not finished after 0.05 minutes"
    assert "| `give.py 2.5` | calls | 2.5 x | at most 2, **missed** |  |" in figures.rendered(list(results.values()))
    figures.BENCHMARKS |= {"broken": "give.py 1", "late": "give.py 1"}
    assert figures.main([]) == 0
    again = {line["benchmark"]: line for line in figures.read(figures.RESULTS)}
    assert [name for name in results if again[name] == results[name]] == ["fast", "slow"]


def test_figures_of_another_commit_or_machine_are_moved_to_the_history(
    figures: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures.main(["--only", "fast"])
    (old,) = figures.read(figures.RESULTS)
    monkeypatch.setattr(figures, "commit", lambda: "b" * 40)
    figures.main(["--only", "slow"])
    (new,) = figures.read(figures.RESULTS)
    assert (new["benchmark"], new["commit"]) == ("slow", "b" * 40)
    assert figures.read(figures.HISTORY) == [old]
    with pytest.raises(SystemExit, match="one commit and one machine"):
        figures.rendered([old, new])


def test_a_figure_that_depends_on_the_processor_is_printed_with_its_cpu_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert figure("calls", 1.234, "x", at_most=2, cpu_us=319.4, bare_cpu_us=170)
    assert not figure("rate", 9_999.0, "per second", at_least=10_000)
    first, second = capsys.readouterr().out.splitlines()
    assert first == "calls: 1.23 x (target: at most 2; depends on the processor: 319 us, bare 170 us of CPU per call)"
    assert second == "rate: 9,999 per second (target: at least 10,000)"
