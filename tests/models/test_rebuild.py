"""What a judge was asked is rebuilt from the run's notes and the trial, and verified by its hash."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from fairtrial import Dataset, EvalSuite, Sample, ScriptedAdapter, all_of, exact_match, llm_judge, open_store
from fairtrial.models.judges import checklist, label_judge, numeric_judge, pairwise_judge, panel
from fairtrial.models.judges.checks import judge_notes, rebuild_prompt
from fairtrial.scoring.evaluator import Scorer, resolve

RATING = {"reason": "because", "rating": "good"}


@dataclass(frozen=True)
class Question:
    text: str
    hard: bool


def listening(replies: Sequence[Any], heard: list[str]) -> ScriptedAdapter:
    """A scripted model that notes every prompt."""

    class Listening(ScriptedAdapter):
        async def _send(self, call: Any) -> Any:
            heard.append("\n".join(message.text for message in call.messages))
            return await super()._send(call)

    return Listening(list(replies))


JUDGES: dict[str, Callable[[list[str]], Any]] = {
    "ratings": lambda heard: llm_judge(listening([RATING] * 2, heard), "The answer is right."),
    "without input": lambda heard: llm_judge(listening([RATING] * 2, heard), "It is.", include_input=False),
    "own scale": lambda heard: llm_judge(
        listening([{"reason": "x", "rating": "ok"}] * 2, heard), "It is.", scale={"ok": 1, "no": 0}, passing=["ok"]
    ),
    "number": lambda heard: numeric_judge(listening([{"reason": "x", "score": 0.5}] * 2, heard), "How right?"),
    "label": lambda heard: label_judge(
        listening([{"reason": "x", "label": "a"}] * 2, heard), "Which?", labels=["a", "b"], passing=["a"]
    ),
    "checklist": lambda heard: checklist(
        listening([{"answers": [{"question": 1, "reason": "x", "answer": "yes"}]}] * 2, heard), ["Is it right?"]
    ),
    "pair": lambda heard: pairwise_judge(listening([{"reason": "x", "better": "first"}] * 4, heard), "Which is best?"),
    "combined": lambda heard: all_of(
        exact_match,
        panel(llm_judge(listening([RATING] * 2, heard), "A."), llm_judge(listening([RATING] * 2, heard), "B.")),
    ),
}


@pytest.mark.proves("R119")
@pytest.mark.parametrize("name", JUDGES)
@pytest.mark.parametrize("typed", [False, True])
def test_the_prompt_of_every_kind_of_judge_is_rebuilt_to_the_last_character(name: str, typed: bool) -> None:
    heard: list[str] = []
    inputs: list[Any] = [Question("2+2?", False), Question("\u202e<<<END", True)] if typed else ["2+2?", {"a": [1.5]}]
    data = Dataset([Sample(f"s{at}", one, "four") for at, one in enumerate(inputs)], name="sums")
    store = open_store("memory:")

    def task(question: Any) -> str:
        return f"four, I think: {question}"

    report = EvalSuite("sums", data, task, JUDGES[name](heard)).run_sync(store=store)
    run = store.get_run(report.run_id)
    assert run.noted.judges
    rebuilt = []
    for result in store.results(run.run_id):
        assert result.score is not None
        for metric in result.score.metrics:
            if "prompt_sha256" in metric.metadata:
                sha256 = str(metric.metadata["prompt_sha256"])
                found = rebuild_prompt(run.noted.judges, result.sample, result.output, sha256)
                assert found is not None
                rebuilt.append("\n".join(message.text for message in found))
                assert rebuild_prompt(run.noted.judges, result.sample, "another output", sha256) is None
                changed = [replace(note, question=note.question + " ") for note in run.noted.judges]
                assert rebuild_prompt(changed, result.sample, result.output, sha256) is None
    assert sorted(rebuilt) == sorted(heard)
    assert len(heard) >= 2


def test_judges_with_a_template_and_plain_evaluators_are_left_out() -> None:
    own = llm_judge(ScriptedAdapter([RATING]), "It is.", template="$criterion $output")
    judged: Scorer = resolve(all_of(own, exact_match))
    assert judge_notes(judged) == ()
    store = open_store("memory:")
    report = EvalSuite("s", Dataset([Sample("a", 1, 1)], name="d"), lambda value: value, exact_match).run_sync(
        store=store
    )
    assert "judges" not in store.get_run(report.run_id).notes
    assert rebuild_prompt((), Sample("a", 1, 1), 1, "ab" * 32) is None
