"""A small project of OpenAI's hosted Evals, with everything that makes one hard to save and to import."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fairtrial.integrations.model_server import HostedEvals

CAPITALS = [
    ("France", "Paris"), ("Japan", "Tokyo"), ("Peru", "Lima"), ("Italy", "Rome"), ("Kenya", "Nairobi"),
    ("Chile", "Santiago"), ("Egypt", "Cairo"), ("Spain", "Madrid"), ("Nepal", "Kathmandu"), ("Cuba", "Havana"),
]  # fmt: skip
ROWS = [{"item": {"country": country, "capital": capital}} for country, capital in CAPITALS]
EXACT, NAMES, TONE = "exact-0001", "names it-0002", "tone-0003"


def message(text: str) -> list[dict[str, str]]:
    return [{"role": "developer", "content": text}]


CRITERIA: list[dict[str, Any]] = [
    {"type": "string_check", "id": EXACT, "name": "exact", "operation": "eq", "input": "{{sample.output_text}}",
     "reference": "{{item.capital}}"},
    {"type": "string_check", "id": NAMES, "name": "names it", "operation": "ilike",
     "input": "{{ sample.output_text }}", "reference": "{{ item.capital }}"},
    {"type": "score_model", "id": TONE, "name": "tone", "model": "gpt-4.1", "range": [1, 7], "pass_threshold": 4,
     "input": message("How friendly is {{sample.output_text}}?")},
]  # fmt: skip


def sample_of(question: str, answer: str, **changes: Any) -> dict[str, Any]:
    return {
        "model": "gpt-4.1-mini",
        "input": [{"role": "user", "content": f"What is the capital of {question}?"}],
        "output": [{"role": "assistant", "content": answer}],
        "finish_reason": "stop",
        "error": None,
        "usage": {"prompt_tokens": 12, "completion_tokens": 3, "cached_tokens": 2, "total_tokens": 15},
        **changes,
    }


def result_of(name: str, score: float | None, passed: bool | None, **more: Any) -> dict[str, Any]:
    return {"name": name, "type": "string-check-grader", "score": score, "passed": passed, "sample": None, **more}


def item_of(run_id: str, number: int, answer: str, *, part: int = 0, **changes: Any) -> dict[str, Any]:
    row = ROWS[number % len(ROWS)]["item"]
    exact, names = answer == row["capital"], row["capital"].lower() in answer.lower()
    tone = 1 + (number * 3) % 7
    return {
        "object": "eval.run.output_item",
        "id": f"{run_id}_item_{number:03}_{part}",
        "eval_id": "eval_capitals",
        "run_id": run_id,
        "created_at": 1_790_000_002 + number,
        "datasource_item_id": number,
        "datasource_item": row,
        "status": "pass" if exact and names and tone >= 4 else "fail",
        "results": [
            result_of(EXACT, float(exact), exact),
            result_of(NAMES, float(names), names),
            result_of(TONE, float(tone), tone >= 4),
        ],
        "sample": sample_of(row["country"], answer),
        **changes,
    }


def run_of(run_id: str, items: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    counts = {name: sum(item["status"] == status for item in items)
              for name, status in (("passed", "pass"), ("failed", "fail"), ("errored", "error"))}  # fmt: skip
    return {
        "object": "eval.run",
        "id": run_id,
        "eval_id": "eval_capitals",
        "name": f"Run {run_id}",
        "model": "gpt-4.1-mini",
        "status": "completed",
        "created_at": 1_790_000_000,
        "error": None,
        "metadata": {"team": "maps"},
        "report_url": f"https://platform.openai.com/evaluations/eval_capitals?run_id={run_id}",
        "data_source": {"type": "completions", "source": {"type": "file_content", "content": ROWS}},
        "result_counts": {"total": len(items), **counts},
        "per_model_usage": [],
        "per_testing_criteria_results": [],
        **changes,
    }


def eval_of(eval_id: str, name: str, criteria: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "object": "eval",
        "id": eval_id,
        "name": name,
        "created_at": 1_780_000_000,
        "metadata": {},
        "data_source_config": {"type": "custom", "schema": {"type": "object"}},
        "testing_criteria": criteria,
    }


def answers(run_id: str, wrong: dict[int, str], *, count: int = len(ROWS)) -> list[dict[str, Any]]:
    return [item_of(run_id, number, wrong.get(number, CAPITALS[number % len(ROWS)][1])) for number in range(count)]


def small_project(*, page_size: int = 4) -> HostedEvals:
    """One eval with two finished runs over the same ten questions."""
    first = answers("evalrun_a", {2: "It is Lima.", 5: "Valparaiso", 7: "Barcelona"})
    second = answers("evalrun_b", {5: "Valparaiso"})
    return HostedEvals(
        evals=[eval_of("eval_capitals", "Capitals: short answers", CRITERIA)],
        runs=[run_of("evalrun_a", first), run_of("evalrun_b", second, model="gpt-4.1", created_at=1_790_000_001)],
        items={"evalrun_a": first, "evalrun_b": second},
        page_size=page_size,
    )


def large_project(*, runs: int = 4, count: int = 60) -> HostedEvals:
    """Two evals, several runs of many items with long answers, an uploaded file, and a query as data source."""
    project = HostedEvals(
        evals=[
            eval_of("eval_capitals", "Capitals", CRITERIA),
            eval_of("eval_other", "Other", CRITERIA[:1]),
            eval_of("eval_empty", "Nobody ran it", []),
        ],
        files={"file-rows": "".join(json.dumps(row) + "\n" for row in ROWS)},
        page_size=7,
    )
    for number in range(runs):
        run_id = f"evalrun_{number}"
        items = answers(run_id, {1: "long \u2028 " + "x" * 30_000, 4: "\U0001f600 no"}, count=count)
        owner = "eval_other" if number == 1 else "eval_capitals"
        for item in items:
            item["eval_id"] = owner
        source: dict[str, Any] = {"type": "file_content", "content": ROWS}
        if number == 2:
            source = {"type": "file_id", "id": "file-rows"}
        project.runs.append(run_of(run_id, items, eval_id=owner, data_source={"type": "completions", "source": source}))
        project.items[run_id] = items
    return project


def write_archive(project: HostedEvals, folder: Path) -> Path:
    """The folder that the script makes of a project."""
    (folder / "items").mkdir(parents=True, exist_ok=True)
    write_lines(folder / "evals.jsonl", project.evals)
    write_lines(folder / "runs.jsonl", project.runs)
    for run_id, items in project.items.items():
        write_lines(folder / "items" / f"{run_id}.jsonl", items)
    for file_id, content in project.files.items():
        (folder / "files").mkdir(exist_ok=True)
        (folder / "files" / file_id).write_text(content)
    return folder


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
