"""Output of commands about cost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Cli

ASKING = """
from fairtrial import Dataset, EvalConfig, EvalSuite, Sample, TokenUsage, exact_match
from fairtrial.models.judges import llm_judge
from fairtrial.models import MarkdownSection, PromptTemplate, ScriptedAdapter, prompt_task

model = ScriptedAdapter(lambda messages: "a", model="tiny", usage=TokenUsage(1_000, 100))
prompt = PromptTemplate[str](key="ask", sections=[MarkdownSection[None]("", "$question")])
dataset = Dataset([Sample(str(n), str(n), "a") for n in range(5)])
suite = EvalSuite("asking", dataset, prompt_task(prompt, model), exact_match, config=EvalConfig(max_concurrent=1))
verdict = {"reason": "r", "rating": "good"}
judge = llm_judge(ScriptedAdapter([verdict], repeat=True, usage=TokenUsage(9, 1, cost_usd=0.25)), "Right.")
judged = EvalSuite("judged", dataset, lambda given: given, judge, config=EvalConfig(max_concurrent=1))
"""
PRICES = "[tool.fairtrial.prices]\ntiny = { input = 2, output = 10 }\n"


@pytest.fixture
def asking(place: Path) -> Path:
    (place / "asking.py").write_text(ASKING)
    return place


def test_a_run_at_its_cost_cap_says_how_to_resume_and_resumes_with_a_higher_cap(cli: Cli, asking: Path) -> None:
    (asking / "pyproject.toml").write_text(PRICES)
    done = cli("run", "asking.py:suite", "--max-cost", "0.005")
    assert done.code == 3
    assert "the cost reached $0.0060 of $0.0050. Raise max_cost_usd (--max-cost) to resume" in " ".join(
        done.out.split()
    )
    assert "fairtrial run asking.py:suite --max-cost 0.01   resume with a higher limit" in done.out
    done = cli("run", "asking.py:suite", "--max-cost", "0.1")
    assert (done.code, "$0.0150" in done.out) == (0, True)
    assert cli("show", "asking", "--json").json["experiments"][0]["cost_usd"] == 0.015


def test_an_unknown_price_is_shown_as_unknown_and_refused_by_strict_cost(
    cli: Cli, asking: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIRTRIAL_STRICT_COST", "true")
    done = cli("run", "asking.py:suite")
    assert done.code == 2
    assert done.err.startswith("error: strict_cost: the price of 'tiny' is unknown\n")
    assert "[tool.fairtrial.prices]" in done.err
    monkeypatch.setenv("FAIRTRIAL_STRICT_COST", "false")
    done = cli("run", "asking.py:suite")
    assert (done.code, "unknown" in done.out) == (0, True)
    assert "task cost unknown" in cli("show", "asking", "--sample", "0").out
    (asking / "prices.toml").write_text("tiny = { input = 2, output = 10 }")
    monkeypatch.setenv("FAIRTRIAL_PRICES", "prices.toml")
    monkeypatch.setenv("FAIRTRIAL_STRICT_COST", "1")
    assert cli("run", "asking.py:suite", "--resume", "never").code == 0


def test_answers_from_the_cache_are_marked(cli: Cli, asking: Path) -> None:
    text = ASKING.replace('model="tiny",', 'model="tiny", cache=ResponseCache("cache.db", "read-write"),')
    (asking / "asking.py").write_text(text.replace("import MarkdownSection,", "import MarkdownSection, ResponseCache,"))
    cli("run", "asking.py:suite")
    assert "5 calls" not in cli("show", "asking", "--full").out
    cli("run", "asking.py:suite", "--resume", "never")
    assert "5 calls" in cli("show", "asking", "--full").out
    shown = cli("show", "asking", "--sample", "0").out
    assert "model  tiny: 1,000 + 100 tokens, from the response cache" in shown
    assert "1 call from the response cache" in shown


def test_rescoring_has_a_cost_cap(cli: Cli, asking: Path) -> None:
    assert cli("run", "asking.py:judged", "--quiet").code == 0
    facts = cli("rescore", "judged", "asking.py:judged", "--max-cost", "0.5", "--json").json
    assert facts["run"]["status"] == "interrupted"
    assert facts["experiments"][0]["judge_cost_usd"] == 0.5
    shown = cli("show", "judged@1", "--sample", "0").out
    assert "judge cost $0.2500" in shown
