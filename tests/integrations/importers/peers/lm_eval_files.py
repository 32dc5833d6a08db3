"""Write samples of lm-evaluation-harness: python lm_eval_files.py DIR. Run by python scripts/peers files."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.loggers import EvaluationTracker
from lm_eval.tasks import TaskManager

CAPITALS = {"France": "Paris", "Japan": "Tokyo", "Peru": "Lima", "Kenya": "Nairobi", "Chile": "Santiago"}
DATA = """
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "The capital of {{{{country}}}} is"
"""
CHOICE = """
task: capitals_choice
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: "{{choices.index(capital)}}"
metric_list:
  - {metric: acc}
  - {metric: acc_norm}
"""
TEXT = """
task: capitals_text
output_type: generate_until
doc_to_target: "{{capital}}"
generation_kwargs: {until: ["\\n"]}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
filter_list:
  - {name: strict, filter: [{function: take_first}]}
  - name: flexible
    filter:
      - {function: regex, regex_pattern: "([A-Z][a-z]+)"}
      - {function: take_first}
"""


class Table(LM):
    """A model that knows most capitals."""

    def loglikelihood(self, requests):
        scored = []
        for request in requests:
            question, answer = request.args
            country = next(name for name in CAPITALS if name in question)
            right = answer.strip() == CAPITALS[country] and country != "Peru"
            scored.append((-1.0 if right else -2.5 - len(answer) / 10, right))
        return scored

    def generate_until(self, requests):
        answers = []
        for request in requests:
            country = next(name for name in CAPITALS if name in request.args[0])
            answers.append({"Japan": "Tokyo, of course", "Kenya": "Mombasa"}.get(country, CAPITALS[country]))
        return answers

    def loglikelihood_rolling(self, requests):
        return [-10.0 for _ in requests]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    work = folder / "tasks"
    work.mkdir()
    names = list(CAPITALS.values())
    rows = [
        {"country": country, "capital": capital, "choices": [names[n % 5], names[(n + 1) % 5], "Rome"]}
        for n, (country, capital) in enumerate(CAPITALS.items())
    ]
    rows = [
        {"country": country, "capital": capital, "choices": [names[n % 5], names[(n + 1) % 5], "Rome"]}
        for n, (country, capital) in enumerate(CAPITALS.items())
    ]
    (work / "data.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (work / "choice.yaml").write_text(DATA.format(data=work / "data.json") + CHOICE)
    (work / "text.yaml").write_text(DATA.format(data=work / "data.json") + TEXT)
    tracker = EvaluationTracker(output_path=str(folder / "out"))
    results = simple_evaluate(
        model=Table(),
        tasks=["capitals_choice", "capitals_text"],
        task_manager=TaskManager(include_path=str(work), include_defaults=False),
        log_samples=True,
        evaluation_tracker=tracker,
        bootstrap_iters=100,
    )
    samples = results.pop("samples")
    tracker.save_results_aggregated(results=results, samples=samples)
    for task in results["configs"]:
        tracker.save_results_samples(task_name=task, samples=samples[task])
    for file in (folder / "out").rglob("*.json*"):
        file.rename(folder / file.name)
