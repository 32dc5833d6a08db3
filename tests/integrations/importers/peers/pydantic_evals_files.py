"""Write a report of pydantic-evals: python pydantic_evals_files.py DIR. Run by python scripts/peers files."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from pydantic_evals import Case, Dataset, increment_eval_metric, set_eval_attribute
from pydantic_evals.evaluators import EqualsExpected, EvaluationReason, Evaluator, EvaluatorContext
from pydantic_evals.reporting import EvaluationReportAdapter, ReportCaseAggregate

CAPITALS = {"France": "Paris", "Japan": "Tokyo", "Peru": "Lima", "Kenya": "Nairobi"}


@dataclass
class Closeness(Evaluator):
    def evaluate(self, ctx: EvaluatorContext) -> dict[str, object]:
        same = sum(a == b for a, b in zip(ctx.output, ctx.expected_output, strict=False))
        return {
            "closeness": EvaluationReason(same / max(len(ctx.expected_output), len(ctx.output)), f"{same} letters"),
            "length": float(len(ctx.output)),
            "size": "long" if len(ctx.output) > 5 else "short",
        }


async def answer(country: str) -> str:
    if country == "Kenya":
        raise LookupError("no answer for Kenya")
    increment_eval_metric("input_tokens", 11)
    increment_eval_metric("tries", 1 + len(country) / 3)
    set_eval_attribute("source", "memory")
    return {"Peru": "Limas"}.get(country, CAPITALS[country])


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    dataset = Dataset(
        name="capitals",
        cases=[
            Case(name=country.lower(), inputs=country, expected_output=capital, metadata={"letters": len(country)})
            for country, capital in CAPITALS.items()
        ],
        evaluators=[EqualsExpected(), Closeness()],
    )
    report = dataset.evaluate_sync(answer, name="capitals", repeat=2, progress=False)
    (folder / "report.json").write_bytes(EvaluationReportAdapter.dump_json(report, indent=1) + b"\n")
    # Over all cases, not the mean of the means of repeated cases.
    flat = ReportCaseAggregate.average(report.cases)
    averages = {"scores": flat.scores, "metrics": flat.metrics, "assertions": flat.assertions}
    (folder / "reported.json").write_text(json.dumps(averages, indent=1, sort_keys=True) + "\n")
    dataset.to_file(folder / "dataset.yaml", schema_path=None)
