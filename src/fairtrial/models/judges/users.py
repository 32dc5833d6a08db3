"""The check of simulated users: whether the user of a conversation kept to its brief."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from fairtrial.base.codec import to_json
from fairtrial.base.frozen import first_is
from fairtrial.data.session.views import JUDGE, RecordedView
from fairtrial.errors import BrokenUserError, ConfigurationError
from fairtrial.models.adapter import ProviderAdapter
from fairtrial.models.conversation import ConversationEnded
from fairtrial.models.judges.rubric import Checklist
from fairtrial.models.users import UserBriefed, words_of_user
from fairtrial.scoring.evaluator import Case
from fairtrial.scoring.score import Score

USER_QUESTIONS = (
    "Does every fact that the user states about themselves, their case or their wishes stand in the brief or follow "
    "from it? What they may have heard from the assistant, whose words you do not see, is no invention; saying that "
    "they do not know something is no fact.",
    "Does the user say nothing that this person cannot know, such as that they are simulated, the text of the brief, "
    "the tools or internal rules of the assistant, or how the conversation will be judged?",
    "If the user ended the conversation, did they do so in accordance with the brief: not before they had said what "
    "they want, and not while they were waiting for something? Answer yes if they did not end it.",
    "Does the user speak as the user only: do they not answer in place of the assistant, do its work, or dictate its "
    "steps?",
)
"""What `user_check` asks; yes is good. A change of the wording is a new version."""


@first_is(bool)
@dataclass(frozen=True, slots=True)
class UserChecked:
    """A judge has read what a simulated user said: whether it broke its rules, and how."""

    broken: bool
    reason: str = ""
    judge: str = ""


class UserCheck(Checklist):
    """A checklist about the user of a conversation; see `user_check`."""

    __slots__ = ()

    def __init__(self, adapter: ProviderAdapter, questions: Sequence[str], name: str) -> None:
        super().__init__(adapter, questions, include_input=False, name=name, pass_at=1.0)
        self.needs_session = True

    @property
    def is_guard(self) -> bool:
        """True: a trial with a broken user has no score, and other trials are not better for a sound one."""
        return True

    @property
    def question(self) -> str:
        """What it asks."""
        return (
            "The output to assess is what the simulated user of a conversation said, message by message. The brief is "
            f"what that user was told. The answers of the assistant are left out.\n\n{super().question}"
        )

    def material(self, case: Case) -> dict[str, Any]:
        """Return what the judge sees: the brief and the user's own words, nothing of the agent and of the result."""
        session = _session(case)
        brief, ended = session[UserBriefed].latest(), session[ConversationEnded].latest()
        said: list[Any] = [message.text for message in words_of_user(session)]
        if ended is not None and ended.reason == "user":
            said.append({"ended the conversation": ended.detail or "without a reason"})
        told = {} if brief is None else {"goal": brief.goal, "persona": brief.persona, "knows": brief.knows}
        return {"brief": {name: text for name, text in told.items() if text}, "output_to_assess": to_json(said)}

    async def score(self, case: Case) -> Score:
        """Check the user; a conversation without a simulated one has nothing to check.

        Raises:
            BrokenUserError: the user broke its rules.
        """
        if _session(case)[UserBriefed].latest() is None:
            return self.verdict(1.0, True, "there is no simulated user to check")
        if not words_of_user(_session(case)):
            raise self._broken(case, "it ended the conversation before it had said anything")
        score = await self.answered(case)
        if not score.passed:
            failed = [metric for metric in score.metrics if metric.passed is False and metric.name != self.name]
            reasons = (f"{metric.reason} (question {metric.name.partition(':')[0]})" for metric in failed)
            raise self._broken(case, "; ".join(reasons))
        if case.recorder is not None:
            case.recorder.record(UserChecked(False, judge=self.name), actor=JUDGE)
        return score

    def _broken(self, case: Case, reason: str) -> BrokenUserError:
        if case.recorder is not None:
            case.recorder.record(UserChecked(True, reason, self.name), actor=JUDGE)
        return BrokenUserError(f"the simulated user broke its rules: {reason}")


def _session(case: Case) -> RecordedView:
    return cast("RecordedView", case.session)


def user_check(
    adapter: ProviderAdapter, *, questions: Sequence[str] = USER_QUESTIONS, name: str = "user check"
) -> UserCheck:
    """A judge that finds conversations whose simulated user broke its rules: `all_of(user_check(judge), solved)`.

    It reads the user's brief and words, nothing of the agent and of the result. A trial with a broken user ends in a
    `user_error`: it has no score, and is no failure of the agent. The check is no criterion and changes no score.

    Judges err: review a random sample of both kinds of trials before you rely on the rate.

    Args:
        adapter: The judge's model.
        questions: Questions instead of the provided ones, of which yes is good.
        name: Its name in reports.
    """
    if not questions:
        raise ConfigurationError("user_check must have at least one question (got none)")
    return UserCheck(adapter, questions, name)
