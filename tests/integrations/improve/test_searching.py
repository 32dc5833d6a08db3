"""Searches: each evaluation once, errors left out, a budget that holds, and one comparison on samples never seen."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from fairtrial import ConfigurationError, Dataset, EvalSuite, Experiment, Sample, Score, TrialContext
from fairtrial.data.session import ChatMessage, TokenUsage
from fairtrial.data.splits import Splits
from fairtrial.integrations.improve.gepa import _scores, gepa, reflection_record
from fairtrial.integrations.improve.searching import Evaluated, Optimizer, Searching
from fairtrial.models import ScriptedAdapter
from fairtrial.reports import EvalReport
from fairtrial.reports.plan.plan import plan
from fairtrial.reports.search.search import Search, read_search
from fairtrial.store.memory import MemoryStore
from fairtrial.store.protocol import RunStore

DATA = Dataset([Sample(f"s{n}", random.Random(n).randbytes(20).hex(), "yes") for n in range(60)], name="support")
SPLITS: Splits[str, str] = DATA.split(seed=1)
RATES = {"Answer.": 0.4, "Guess.": 0.3, "Look it up.": 1.0, "Ask.": 0.6}
BASELINE = Experiment("plain", {"prompt": "Answer.", "style": "terse"})


class Answers:
    """A task that counts what it is asked, and passes at the rate of its prompt; some inputs end in an error."""

    def __init__(self, broken: Callable[[str, str], bool] = lambda prompt, input: False) -> None:
        self.asked: Counter[tuple[str, str]] = Counter()
        self.broken = broken

    def __call__(self, input: str, ctx: TrialContext) -> str:
        prompt = str(ctx.experiment.params["prompt"])
        assert ctx.experiment.params["style"] == "terse"
        self.asked[prompt, input] += 1
        if self.broken(prompt, input):
            raise RuntimeError("the line is dead")
        return (
            "yes" if random.Random(f"{prompt} {input}").random() < RATES.get(prompt.partition("\n")[0], 0.0) else "no"
        )


def right(output: str, expected: str) -> Score:
    return Score(float(output == expected), reason="" if output == expected else "it must say yes")


def try_all(search: Searching) -> None:
    """An optimizer of ten lines: evaluate some texts on both splits."""
    for text in list(RATES)[1:]:
        search.evaluate(text, search.train[:5], [search.baseline])
        search.evaluate(text, search.validation)


def search_with(
    store: RunStore,
    task: Any,
    optimizer: Optimizer = try_all,
    *,
    model: ScriptedAdapter | None = None,
    max_cost: float | None = None,
    max_trials: int | None = 10_000,
    name: str = "mine",
    announce: Callable[[str], None] = lambda line: None,
) -> Search:
    suite = EvalSuite("support", DATA, task, right, experiments=[BASELINE], version="1")
    search = Searching(
        suite, BASELINE, "prompt", splits=SPLITS, store=store, optimizer=name, model=model,
        max_cost_usd=max_cost, max_trials=max_trials, announce=announce,
    )  # fmt: skip
    search.run(optimizer)
    return read_search(store, search.name)


def test_the_best_on_validation_is_compared_once_on_samples_that_the_search_never_saw() -> None:
    store, task = MemoryStore(), Answers()
    found = search_with(store, task)
    assert found.winner is not None
    assert found.winner.text == "Look it up."
    assert found.winner.parents == (found.candidates[0].id,)
    assert found.status == "tested"
    assert found.tested is not None
    assert found.tested.verdict == "better"
    assert found.ended == "mine has no further candidates"
    tested = {sample.input for sample in SPLITS.test}
    assert {prompt for prompt, input in task.asked if input in tested} == {"Answer.", "Look it up."}
    assert len(store.looks(SPLITS.test.fingerprint)) == 1
    assert set(task.asked.values()) == {1}


def test_a_gain_that_is_the_same_on_both_splits_is_said_to_be_the_same() -> None:
    def obeys(input: str, ctx: TrialContext) -> str:
        return "yes" if ctx.experiment.params["prompt"] == "Ask." else "no"

    assert "the validation figure was the same" in search_with(MemoryStore(), obeys).to_markdown()


def test_the_same_search_again_calls_nothing_and_is_no_new_look() -> None:
    store = MemoryStore()
    first = search_with(store, Answers())
    again = Answers()
    assert search_with(store, again).to_json() == first.to_json()
    assert not again.asked
    assert len(store.looks(SPLITS.test.fingerprint)) == 1


def test_a_search_that_continues_lets_its_optimizer_see_the_same_work() -> None:
    """GEPA ends after 50 iterations without work: what is stored counts, or a continued search would end too early."""
    store, seen = MemoryStore(), []

    def optimizer(search: Searching) -> None:
        for text in ("Guess.", "Guess.", "Look it up."):
            search.evaluate(text, search.validation)
            search.ask("better?")
            seen.append(search.work)

    for _ in range(2):
        search_with(store, Answers(), optimizer, model=ScriptedAdapter(proposals))
    assert seen == [3, 4, 6] * 2


def test_why_a_search_ended_stays_when_it_is_only_read_again() -> None:
    def optimizer(search: Searching) -> None:
        search.evaluate("Look it up.", search.validation)
        search.evaluate("Guess.", search.validation)

    store, budget = MemoryStore(), 0.001 * (2 * len(SPLITS.validation) + 1.2 * 2 * len(SPLITS.test) + 3)
    first, again = (search_with(store, paid(), optimizer, max_cost=budget, max_trials=None) for _ in range(2))
    assert first.winner is not None
    assert first.ended.endswith("are kept for the test")
    assert again.ended == first.ended


def test_what_the_test_split_can_show_is_said_before_the_search() -> None:
    store = MemoryStore()
    lines: list[str] = []
    found = search_with(store, Answers(), announce=lines.append)
    gain = f"The test split has {len(SPLITS.test)} samples. Its first look, at a level of 2.5%, "
    assert [line.startswith(gain) for line in lines[:2]] == [False, True]
    assert "baseline on validation" in lines[0]
    assert found.tested is not None, "the first look"
    assert found.candidates[0].validation is not None
    run = store.get_run(found.candidates[0].validation.runs[0])
    planned = plan(EvalReport(store, run)).test_split
    assert planned is not None
    assert planned.look == 2
    assert planned.alpha == pytest.approx(0.05 / 6), "improve spends alpha, without a plan too"
    lines.clear()
    search_with(store, Answers(), announce=lines.append)
    assert not any("test split" in line for line in lines)


def test_a_parent_that_was_never_evaluated_is_left_out() -> None:
    def optimizer(search: Searching) -> None:
        search.evaluate("Look it up.", search.validation, ["Dream.", "Look it up.", search.baseline])

    found = search_with(MemoryStore(), Answers(), optimizer)
    assert found.candidates[1].parents == (found.candidates[0].id,)
    assert "candidate 1 (chosen)" in found.to_markdown()


def test_a_terminal_shows_the_text_that_was_chosen_and_the_best_of_many_candidates() -> None:
    texts = [f"Guess.\n\n  - {number} `times` <b>" for number in range(14)]

    def optimizer(search: Searching) -> None:
        for text in texts:
            search.evaluate(text, search.validation[:1])
        search.evaluate("Look it up.\n\n  - ```twice``` <b>", search.validation)

    found = search_with(MemoryStore(), Answers(), optimizer)
    assert "The text of candidate 15\n  Look it up.\n\n    - ```twice``` <b>\n" in str(found)
    assert str(found).count("\ncandidate ") == 12  # Ten lines below the baseline, and the heading
    assert "\ncandidate 15 (chosen)" in str(found)
    assert "4 further candidates: fairtrial view, or --json" in str(found)
    assert "````\nLook it up.\n\n  - ```twice``` <b>\n````" in found.to_markdown()
    page = found.to_html()
    assert "<pre>Look it up.\n\n  - ```twice``` &lt;b&gt;</pre>" in page
    assert all(f"- {number} `times` &lt;b&gt;" in page for number in range(14))


def test_a_search_that_goes_on_and_finds_another_winner_is_a_second_look() -> None:
    store = MemoryStore()
    size = len(SPLITS.validation)

    def tries(*texts: str) -> Optimizer:
        def optimizer(search: Searching) -> None:
            for text in texts:
                search.evaluate(text, search.validation)

        return optimizer

    first = search_with(store, Answers(), tries("Ask.", "Look it up."), max_trials=2 * size)
    assert (first.winner and first.winner.text, first.ended) == ("Ask.", f"{2 * size} of {2 * size} trials were used")
    assert first.comparison is not None
    task = Answers()
    second = search_with(store, task, tries("Ask.", "Look it up."))
    assert second.name == first.name
    assert {prompt for prompt, _ in task.asked} == {"Answer.", "Look it up."}, "the first candidate was not asked again"
    assert second.comparison is not None
    assert second.comparison.looks is not None
    assert second.comparison.looks.numbers == (2,)
    assert second.comparison.alpha == pytest.approx(0.05 / 6)


def test_a_search_killed_before_any_evaluation_continues_without_asking_again() -> None:
    store, task = MemoryStore(), Answers()
    evaluate = Searching.evaluate

    def killed_after(limit: int) -> Optimizer:
        def optimizer(search: Searching) -> None:
            left = limit
            for text in list(RATES)[1:]:
                for samples in (search.train[:5], search.validation):
                    if not left:
                        raise KeyboardInterrupt
                    left -= 1
                    evaluate(search, text, samples)

        return optimizer

    for limit in range(6):
        with pytest.raises(KeyboardInterrupt):
            search_with(store, task, killed_after(limit))
    found = search_with(store, task, killed_after(6))
    assert found.status == "tested"
    assert set(task.asked.values()) == {1}


def test_errors_are_retried_then_left_out_of_the_mean_and_named() -> None:
    broken = SPLITS.validation.samples[0]
    task = Answers(lambda prompt, input: prompt == "Look it up." and input == broken.input)
    seen: list[Evaluated] = []
    found = search_with(
        MemoryStore(), task, lambda search: seen.extend(search.evaluate("Look it up.", search.validation))
    )
    assert [one.sample.id for one in seen if one.score is None] == [broken.id], "an optimizer gets no score either"
    assert task.asked["Look it up.", broken.input] == 3
    assert found.winner is not None
    assert found.winner.validation is not None
    assert (found.winner.validation.mean, found.winner.validation.errors) == (1.0, (broken.id,))
    assert f"1 sample left out after errors: {broken.id}" in found.to_markdown()


def test_a_text_that_breaks_the_task_is_not_chosen_and_does_not_end_the_search() -> None:
    few = {sample.input for sample in SPLITS.validation.samples[:-1]}
    found = search_with(MemoryStore(), Answers(lambda prompt, input: prompt == "Look it up." and input in few))
    assert found.winner is not None
    assert found.winner.text == "Ask."


def test_without_a_better_candidate_no_look_is_spent() -> None:
    store = MemoryStore()
    found = search_with(store, Answers(), lambda search: None)
    assert (found.status, found.comparison, found.winner) == ("no candidate", None, None)
    assert not store.looks(SPLITS.test.fingerprint)
    assert "no test was spent" in found.to_markdown()


def paid(rate: float = 0.001) -> Any:
    """A task whose calls cost something."""
    answers = Answers()
    model = ScriptedAdapter(lambda messages: "fine", usage=TokenUsage(1, 1, cost_usd=rate))

    async def answer(input: str, ctx: TrialContext) -> str:
        await model.complete([ChatMessage("user", input)], session=ctx.session)
        return answers(input, ctx)

    return answer


def test_the_budget_holds_for_search_and_test_together() -> None:
    size, test = len(SPLITS.validation), len(SPLITS.test)
    budget = 0.001 * (size * 2 + 5 + 1.2 * 2 * test + 3)
    found = search_with(MemoryStore(), paid(), max_cost=budget, max_trials=None)
    assert found.ended.endswith("are kept for the test")
    assert found.status in ("tested", "no candidate")
    assert 0 < found.cost_usd <= budget
    with pytest.raises(ConfigurationError, match="the baseline could not be evaluated"):
        search_with(MemoryStore(), paid(), max_cost=0.002, max_trials=None)


def test_a_budget_in_dollars_needs_trials_with_a_price() -> None:
    with pytest.raises(ConfigurationError, match="--max-trials"):
        search_with(MemoryStore(), Answers(), max_cost=1.0, max_trials=None)


def test_a_search_needs_a_text_and_a_baseline_that_works() -> None:
    suite = EvalSuite("support", DATA, Answers(), right, experiments=[BASELINE])

    def made(parameter: str) -> Searching:
        return Searching(
            suite, Experiment("plain", {"prompt": "x", "n": 3}), parameter, splits=SPLITS, store=MemoryStore(),
            optimizer="mine", model=None, max_cost_usd=None, max_trials=9,
        )  # fmt: skip

    with pytest.raises(ConfigurationError, match="no text parameter 'n'\nname one of prompt"):
        made("n")
    with pytest.raises(ConfigurationError, match="no model proposes candidates"):
        made("prompt").ask("better?")
    with pytest.raises(ConfigurationError, match=r"no sample of the validation split was scored.*the line is dead"):
        search_with(MemoryStore(), Answers(lambda prompt, input: True))


def test_an_optimizer_is_told_what_it_may_evaluate() -> None:
    foreign = next(iter(SPLITS.test))

    def peek(search: Searching) -> None:
        search.evaluate("Ask.", [foreign])

    def mistake(search: Searching) -> None:
        search.evaluate("Ask.", search.train, search.baseline)

    with pytest.raises(ConfigurationError, match=f"sample '{foreign.id}' is in neither the train nor the validation"):
        search_with(MemoryStore(), Answers(), peek)
    with pytest.raises(ConfigurationError, match="parents must be a list of texts"):
        search_with(MemoryStore(), Answers(), mistake)


def proposals(messages: Sequence[ChatMessage]) -> str:
    """Propose the good text if the question has the reason of a failure."""
    return "```\nLook it up.\n```" if "it must say yes" in messages[-1].text else "```\nGuess.\n```"


def test_gepa_learns_from_the_reasons_of_failures() -> None:
    model = ScriptedAdapter(proposals)
    found = search_with(MemoryStore(), Answers(), gepa, model=model, max_trials=60, name="gepa")
    assert found.winner is not None
    assert found.winner.text == "Look it up."
    assert found.winner.parents == (found.candidates[0].id,)
    assert found.status == "tested"
    question = model.calls[0].messages[-1].text
    assert "Answer." in question
    assert "Expected: yes" in question


def test_gepa_stops_when_nothing_new_is_proposed() -> None:
    def task(input: str, ctx: TrialContext) -> str:
        return "yes"

    found = search_with(MemoryStore(), task, gepa, model=ScriptedAdapter(proposals), name="gepa")
    assert (found.status, found.ended) == ("no candidate", "gepa has no further candidates")


def test_gepa_ends_with_the_error_of_a_search_without_a_model() -> None:
    with pytest.raises(ConfigurationError, match="no model proposes candidates"):
        search_with(MemoryStore(), Answers(), gepa, name="gepa")


def test_an_error_is_no_score_for_gepa() -> None:
    one, two, three = (
        Evaluated(Sample(name, name), score, ()) for name, score in zip("abc", (1.0, None, 0.5), strict=True)
    )
    assert _scores([one, two, three]) == [1.0, 0.75, 0.5]
    assert _scores([two]) == [float("-inf")]
    assert reflection_record(two) == {"Inputs": "b"}
