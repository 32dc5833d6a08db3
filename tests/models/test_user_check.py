from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fairtrial import (
    ChatMessage,
    Dataset,
    EvalConfig,
    EvalSuite,
    GateRules,
    Sample,
    Score,
    ToolCall,
    all_of,
    compare,
    gate,
    leaderboard,
    stats,
    weighted,
)
from fairtrial.base.rates import rate_bounds
from fairtrial.data.session.views import JUDGE
from fairtrial.errors import ConfigurationError
from fairtrial.models import ScriptedAdapter, agent_task, conversation_task, simulated_user
from fairtrial.models.judges import USER_QUESTIONS, UserChecked, user_check
from fairtrial.reports import EvalReport
from fairtrial.reports.figures.broken_users import BrokenUsers
from fairtrial.reports.figures.labels import draw_trials
from fairtrial.reports.figures.trial_columns import TrialColumns
from fairtrial.runs.opening import user_notes
from fairtrial.store.open import open_store
from fairtrial.viewer.review import new_review

END = ToolCall("end_conversation", {"reason": "bye"})
INVENTED = "My number is 999."
HONEST = "I do not know my number."


def users_model(said: str = HONEST) -> ScriptedAdapter:
    """A user that says one thing, and ends."""

    def reply(messages: Sequence[ChatMessage]) -> Any:
        return said if len(messages) == 2 else [END]

    return ScriptedAdapter(reply, model="user-1")


def judge_of(verdict: Any) -> ScriptedAdapter:
    """A judge that answers the first question with what `verdict` returns for the material."""

    def reply(messages: Sequence[ChatMessage]) -> Any:
        sound = verdict(messages[-1].text)
        words = ["yes" if sound else "no", *["yes"] * (len(USER_QUESTIONS) - 1)]
        answers = [{"question": n, "reason": f"reason {n}", "answer": word} for n, word in enumerate(words, 1)]
        return {"answers": answers}

    return ScriptedAdapter(reply, model="judge-1")


def agent(replies: str = "Your refund is on its way.") -> ScriptedAdapter:
    return ScriptedAdapter([replies], repeat=True, model="agent-1")


def solved(output: Any) -> Score:
    return Score(1.0 if "refund" in output else 0.0)


def suite_of(task: Any, evaluator: Any, samples: int = 1, **config: Any) -> Any:
    data: Dataset[str, Any] = Dataset([Sample(f"s{n}", "a refund") for n in range(samples)])
    return EvalSuite("talk", data, task, evaluator, config=EvalConfig(**config), version="1")


def test_a_broken_user_is_an_error_of_its_own_and_its_reason_is_kept() -> None:
    judge = judge_of(lambda text: "999" not in text)
    task = conversation_task(agent(), simulated_user(users_model(INVENTED), knows="nothing"))
    report = suite_of(task, all_of(user_check(judge), solved)).run_sync(store="memory:")
    (result,) = report.results
    assert (result.outcome, result.stage, result.score) == ("user_error", "score", None)
    assert "the simulated user broke its rules" in (result.error or "")
    assert "reason 1" in (result.error or "")
    assert report.errors == {"user_error": 1}
    recorded = result.session.everything()
    (checked,) = recorded[UserChecked].all()
    assert (checked.broken, checked.judge) == (True, "user check")
    assert result.session[UserChecked].all() == ()


def test_the_judge_sees_the_words_of_the_user_and_nothing_of_the_agent_or_the_result() -> None:
    judge = judge_of(lambda text: True)
    task = conversation_task(agent(), simulated_user(users_model(), persona="Ann", knows=["paid 12"]))
    report = suite_of(task, all_of(user_check(judge), solved)).run_sync(store="memory:")
    (asked,) = [call.messages[-1].text for call in judge.calls]
    for part in (HONEST, "a refund", "Ann", "- paid 12", "ended the conversation", "bye", USER_QUESTIONS[0]):
        assert part in asked
    assert "on its way" not in asked
    # The check is no part of the score.
    (result,) = report.results
    assert [score.name for score in result.scores] == ["solved"]
    assert all(envelope.actor == JUDGE for envelope in result.session.everything().envelopes[-2:])


def test_messages_that_the_agent_prepares_are_no_words_of_its_user() -> None:
    judge = judge_of(lambda text: INVENTED not in text)
    examples = [ChatMessage("user", INVENTED), ChatMessage("assistant", "ok")]
    made = agent_task(agent(), prepare_messages=lambda _sample: examples)
    check = all_of(user_check(judge), solved)
    report = suite_of(conversation_task(made, simulated_user(users_model())), check).run_sync(store="memory:")
    assert (report.errors, report.pass_rate) == ({}, 1.0)
    silent = conversation_task(made, simulated_user(ScriptedAdapter([[END]])))
    assert suite_of(silent, check).run_sync(store="memory:").errors == {"user_error": 1}
    assert len(judge.calls) == 1  # Nothing was said that could be judged.


def test_a_conversation_without_a_simulated_user_is_not_checked() -> None:
    judge = judge_of(lambda text: False)
    report = suite_of(conversation_task(agent(), ["Hi"]), all_of(user_check(judge), solved)).run_sync(store="memory:")
    assert (report.errors, judge.calls) == ({}, ())


def test_a_user_that_ends_before_it_speaks_is_broken_without_a_question_to_the_judge() -> None:
    judge = judge_of(lambda text: True)
    task = conversation_task(agent(), simulated_user(ScriptedAdapter([[END]])))
    report = suite_of(task, all_of(user_check(judge), solved)).run_sync(store="memory:")
    assert (report.errors, judge.calls) == ({"user_error": 1}, ())


def test_broken_users_come_before_other_errors_of_scoring_and_can_be_scored_again() -> None:
    def wrong(output: Any) -> Score:
        raise ValueError("scorer")

    task = conversation_task(agent(), simulated_user(users_model(INVENTED)))
    store = open_store("memory:")
    strict = suite_of(task, all_of(wrong, user_check(judge_of(lambda text: "999" not in text))))
    report = strict.run_sync(store=store)
    assert report.errors == {"user_error": 1}
    lenient = suite_of(task, all_of(user_check(judge_of(lambda text: True)), solved))
    again = lenient.rescore_sync(report.run.run_id, store=store)
    assert (again.errors, again.pass_rate) == ({}, 1.0)


def test_a_check_cannot_be_weighed() -> None:
    with pytest.raises(ConfigurationError, match=r"weighted\(\) cannot combine 'user check'"):
        weighted((user_check(agent()), 1), (solved, 1))


@pytest.mark.proves("R97")
def test_both_rates_are_recovered_from_200_conversations_with_a_judge_of_known_error_rates() -> None:
    draw = random.Random(5)
    samples, misses, false_alarms, solves = 200, 0.1, 0.05, 0.7
    broken = {f"s{n}": draw.random() < 0.15 for n in range(samples)}
    flagged = {name: draw.random() < (1 - misses if is_broken else false_alarms) for name, is_broken in broken.items()}
    # The agent cannot solve what a broken user asks for.
    solving = {name: not is_broken and draw.random() < solves for name, is_broken in broken.items()}

    def says(messages: Sequence[ChatMessage]) -> Any:
        name = messages[0].text.rpartition("goal:\n")[2].split()[0]
        return (f"{name}: {INVENTED}" if broken[name] else f"{name}: {HONEST}") if len(messages) == 2 else [END]

    def answers(messages: Sequence[ChatMessage]) -> str:
        return "a refund" if solving[messages[-1].text.partition(":")[0]] else "no"

    data: Dataset[str, Any] = Dataset([Sample(name, f"{name} wants a refund") for name in broken])
    judge = judge_of(lambda text: not flagged[text.partition('"goal": "')[2].split()[0]])
    task = conversation_task(ScriptedAdapter(answers), simulated_user(ScriptedAdapter(says)))
    report: EvalReport[Any] = EvalSuite("talk", data, task, all_of(user_check(judge), solved), version="1").run_sync(
        store="memory:"
    )
    (part,) = report.parts
    users = BrokenUsers.of(part.totals)
    assert (users.broken, users.trials) == (sum(flagged.values()), samples)
    # The error rates of the judge are known: as from very many labels. A pass is a sound user.
    known = {"true_passes": 9_500, "positives": 10_000, "true_fails": 9_000, "negatives": 10_000}
    sound = stats.rogan_gladen(samples - users.broken, samples, **known).interval
    assert sound is not None
    assert sound.low <= 1 - 0.15 <= sound.high
    assert sound.high - sound.low < 0.16
    passed_low, passed_high = rate_bounds(users.passed, users.trials - users.broken)
    assert passed_low <= solves <= passed_high
    # With the broken users as failures the rate of the agent would have been too low.
    assert rate_bounds(users.passed, samples)[1] < solves
    text = str(report)
    assert f"{users.broken} trials of 200 had a broken user" in text
    assert "more than 5.0%" in text
    low, high = users.bounds
    assert (low, high) == (users.passed / 200, (users.passed + users.broken) / 200)
    assert f"{100 * low:.1f}%" in text
    assert f"{100 * high:.1f}%" in text


def test_few_broken_users_are_told_without_a_warning() -> None:
    warns, text = BrokenUsers(1, 100, 60).remark() or (True, "")
    assert (warns, "1 trial of 100 had a broken user: 1.0%" in text) == (False, True)
    assert BrokenUsers(0, 100, 60).remark() is None


def runs_of(*tasks: Any, samples: int = 40) -> list[EvalReport[Any]]:
    store = open_store("memory:")
    check = judge_of(lambda text: "999" not in text)
    return [
        suite_of(task, all_of(user_check(check), solved), samples=samples).run_sync(store=store, resume="never")
        for task in tasks
    ]


def test_runs_with_other_users_are_compared_only_if_asked_for() -> None:
    same = [conversation_task(agent(), simulated_user(users_model())) for _ in range(2)]
    other = conversation_task(agent(), simulated_user(users_model(), persona="impatient"))
    one, two, three = runs_of(*same, other, samples=8)
    assert not any("users" in line for line in compare(one, two).warnings)
    with pytest.raises(ConfigurationError, match=r"different users .*user-1.*\n.*--other-users"):
        compare(one, three)
    assert any("talked to different users" in line for line in compare(one, three, other_users=True).warnings)
    rules = GateRules(margin=0.5)
    assert gate(two, rules, one).exit_code == 0
    with pytest.raises(ConfigurationError, match=r"different users .*user-1"):
        gate(three, rules, one)
    assert any(
        "talked to different users" in line for line in gate(three, replace(rules, other_users=True), one).warnings
    )
    with pytest.raises(ConfigurationError, match=r"different users .*user-1"):
        leaderboard(one, three)
    assert any("talked to different users" in line for line in leaderboard(one, three, other_users=True).warnings)


def test_the_model_the_prompt_and_the_code_of_a_user_are_part_of_its_digest() -> None:
    def digest(user: Any) -> str:
        suite = suite_of(conversation_task(agent(), user), solved)
        (note,) = user_notes(suite.prepared().rules, "")
        return str(note.digest)

    model = users_model()
    digests = [
        digest(simulated_user(model)),
        digest(simulated_user(model, rules="Be brief.")),
        digest(simulated_user(model, goal="metadata.goal")),
        digest(simulated_user(model, goal=lambda sample: sample.input)),
        digest(simulated_user(ScriptedAdapter(["a"], model="user-2"))),
        digest(["Hi"]),
        digest(["Hello"]),
        digest(lambda messages: None),
        digest(lambda messages: "Hi"),
    ]
    assert len(set(digests)) == len(digests)
    assert digest(["Hi"]) == digests[5]


def test_a_comparison_warns_if_broken_users_differ_between_its_sides() -> None:
    turn = iter(range(1000))

    def says(messages: Sequence[ChatMessage]) -> Any:
        if len(messages) > 2:
            return [END]
        return INVENTED if next(turn) % 80 >= 60 else HONEST  # 20 of the 40 trials of the second run.

    user = simulated_user(ScriptedAdapter(says, model="user-1"))
    sound, broken = runs_of(*(conversation_task(agent(), user) for _ in range(2)))
    assert (sound.errors, broken.errors) == ({}, {"user_error": 20})
    (line,) = [line for line in compare(sound, broken).warnings if "Broken users" in line]
    assert "differ between the sides" in line
    assert "50.0%" in line
    decided = gate(broken, GateRules(margin=0.1), sound)
    assert decided.status == "inconclusive"
    (line,) = [line for line in decided.warnings if "Broken users" in line]
    assert "differ between the sides" in line


def test_a_review_draws_trials_with_broken_users_for_people(tmp_path: Path) -> None:
    task = conversation_task(agent(), simulated_user(users_model(INVENTED)))
    store = open_store(str(tmp_path / "runs.db"))
    check = all_of(user_check(judge_of(lambda text: "999" not in text)), solved)
    report = suite_of(task, check, samples=6).run_sync(store=store)
    review = new_review(report.run, name="users", question="Is the user broken?", size=4, outcome="user_error")
    columns = TrialColumns.open(store, report.run)
    assert len(draw_trials(columns, review).ordinals) == 4
    assert draw_trials(columns, new_review(report.run, name="all", question="?")).ordinals == ()
