"""A judge beside a deterministic check, first tested itself with canaries.

python examples/judge.py                        # against a model server started for the occasion
OPENAI_API_KEY=... python examples/judge.py --model gpt-5-mini
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from fairtrial import Dataset, EvalReport, OpenAIAdapter, all_of, contains, evaluate_sync, llm_judge
from fairtrial.integrations.model_server import ModelServer, ParsedRequest, Reply
from fairtrial.models import ProviderAdapter
from fairtrial.models.judges import JudgeCheck, check_judge_sync
from fairtrial.models.judges.fence import read_fences

QUESTIONS = Dataset.of({"What is the capital of France?": "Paris", "And of Japan?": "Tokyo"}, name="capitals")


def answer(question: str) -> str:
    """The system under test: one polite answer, one rude one."""
    return "The capital of France is Paris." if "France" in question else "Tokyo, obviously."


def run(adapter: ProviderAdapter) -> tuple[JudgeCheck, EvalReport]:
    judge = llm_judge(adapter, "The answer is correct and friendly in tone.", name="friendly")
    checked = check_judge_sync(judge)
    return checked, evaluate_sync(QUESTIONS, answer, all_of(contains, judge))


def strict(request: ParsedRequest) -> Reply:
    """What a sound judge would say, for when there is no model at hand."""
    pieces: Sequence[tuple[str, str, object]] = read_fences(request.last_user)
    output = str(next(piece for _, name, piece in pieces if name == "output_to_assess"))
    friendly = output.startswith("The capital of")
    return Reply(output={"reason": "friendly" if friendly else "curt", "rating": "good" if friendly else "poor"})


def main(model: str | None = None) -> tuple[JudgeCheck, EvalReport]:
    if model is not None:
        return run(OpenAIAdapter(model=model))
    with ModelServer(strict) as server:
        return run(OpenAIAdapter(model="test-model", base_url=f"{server.base_url}/v1", api_key="none"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    for part in main(parser.parse_args().model):
        print(part, end="\n\n")
