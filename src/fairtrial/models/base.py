"""What every adapter does around the one call to its model."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, ClassVar, Self

import anyio

from fairtrial.codec import digest, to_json
from fairtrial.errors import (
    BudgetExceededError,
    CodecError,
    ModelError,
    ModelRefusedError,
    OutputParseError,
    RateLimitedError,
)
from fairtrial.frozen import EMPTY
from fairtrial.metrics import MODEL_CALL_SECONDS
from fairtrial.models.adapter import Completion, OutputT, PromptResponse, ToolSpec
from fairtrial.models.budget import Budget, Spending, SpendingLog, spent_in
from fairtrial.models.cache import ResponseCache, shared_cache
from fairtrial.models.limiter import Limiter, TokenLimiter, Unlimited
from fairtrial.models.pricing import Prices, configured_prices
from fairtrial.models.prompt import Prompt
from fairtrial.models.reply import ModelCall, ModelReply
from fairtrial.models.retry import NO_RETRY, RetryPolicy
from fairtrial.models.schema import output_schema
from fairtrial.models.structured import OutputRepaired, parse_output, repair_messages
from fairtrial.session.events import PromptExecuted, TokenUsage
from fairtrial.session.session import Session
from fairtrial.session.trajectory import ChatMessage
from fairtrial.session.views import JUDGE, SessionView
from fairtrial.trials.context import TrialContext, running_trial

log = logging.getLogger("fairtrial.models")


@dataclass(frozen=True, slots=True)
class ModelCallFailed:
    """A model call failed and was tried again after a pause."""

    prompt_name: str
    adapter: str
    model: str
    error: str
    pause_seconds: float


class BaseAdapter:
    """An adapter's common half. Subclasses say who they are and send one request.

    Args:
        name: The provider.
        model: The model.
        params: Sampling parameters of every call, in the provider's own words.
        retry: When failed calls are tried again.
        limiter: How many calls may be under way at once.
        cache: Where answers are kept.
        trial_budget: What one trial may use through adapters, over all its attempts.
        run_budget: What one run may use through this adapter.
        spending: What counts against `run_budget`: this adapter's calls unless given. One for several adapters, or
            for a fleet, makes them share the budget.
        prices: What the model costs, where no price list knows it or another price was agreed.
    """

    wraps_outputs: ClassVar[bool] = False  # Whether outputs that are not objects travel under "value".
    shares_cache: ClassVar[bool] = False  # Whether it uses the process's cache where it has none of its own.

    def __init__(
        self,
        *,
        name: str,
        model: str,
        base_url: str = "",
        params: Mapping[str, Any] = EMPTY,
        retry: RetryPolicy = NO_RETRY,
        limiter: Limiter | None = None,
        cache: ResponseCache | None = None,
        trial_budget: Budget | None = None,
        run_budget: Budget | None = None,
        spending: SpendingLog | None = None,
        prices: Prices | None = None,
    ) -> None:
        self._name = name
        self._model = model
        self._base_url = base_url
        self._params = dict(params)
        self._retry = retry
        self._limiter = Unlimited() if limiter is None else limiter
        self._token_limiter = self._limiter if isinstance(self._limiter, TokenLimiter) else None
        self._cache = cache
        self._trial_budget = trial_budget
        self._run_budget = run_budget
        self._spending = Spending() if spending is None else spending
        self._prices = prices
        self._cost_unknown = False

    @property
    def has_price(self) -> bool | None:
        """Whether the cost of its calls is known before they are made; None if only the calls can tell."""
        return None if self._given_prices() is None else True

    def _given_prices(self) -> Prices | None:
        return configured_prices(self._model) if self._prices is None else self._prices

    @property
    def name(self) -> str:
        """The provider."""
        return self._name

    @property
    def model(self) -> str:
        """The model."""
        return self._model

    async def _send(self, call: ModelCall) -> ModelReply:
        """Send one request; raise a `ModelError` if that fails."""
        raise NotImplementedError

    async def aclose(self) -> None:
        """Close connections; they open again when they are needed."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def complete(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[ToolSpec] = (),
        output_type: type[OutputT] = str,  # type: ignore[assignment]  # the default of OutputT is str
        params: Mapping[str, Any] = EMPTY,
        session: Session | SessionView | None = None,
        actor: str = "task",
        prompt_name: str = "",
    ) -> Completion[OutputT]:
        """One answer to a conversation.

        Args:
            messages: The conversation.
            tools: What the model may call; a reply with tool calls has no output yet.
            output_type: Any type the codec knows. An answer that is not one is asked for once more.
            params: Sampling parameters, on top of the adapter's own.
            session: Where the call is recorded; the running trial's where none is given.
            actor: Whose call it is: "task" or "judge".
            prompt_name: What the call is recorded under.
        """
        recorder, actor = _recorder(session, actor)
        merged = {**self._params, **params} if params else self._params
        call = ModelCall(tuple(messages), tuple(tools), output_type, merged, prompt_name, actor)
        reply = await self._answer(call, recorder)
        usage = reply.usage
        try:
            output = self._parse(call, reply)
        except CodecError as error:
            problem = str(error)
            again = replace(call, messages=(*call.messages, *repair_messages(problem, reply.message)))
            first, reply = reply, await self._answer(again, recorder)
            usage = reply.usage if usage is None else usage + (reply.usage or TokenUsage())
            output = self._repaired(call, problem, first, reply, recorder)
        return Completion(reply.message, output, usage, reply.finish_reason, reply.model, reply.message.text)

    async def evaluate[O](
        self, prompt: Prompt[O], *, session: Session | SessionView | None = None, actor: str = "task"
    ) -> PromptResponse[O]:
        """The typed output of a bound prompt."""
        completion: Completion[O] = await self.complete(
            prompt.messages, output_type=prompt.output_type, session=session, actor=actor, prompt_name=prompt.name
        )
        if completion.message.tool_calls:
            raise OutputParseError(f"prompt {prompt.name!r} was answered with tool calls", raw=completion.raw)
        return PromptResponse(completion.output, completion)  # type: ignore[arg-type]  # None only where O is None

    async def _answer(self, call: ModelCall, recorder: Session | None) -> ModelReply:
        trial = running_trial()
        cache = self._cache if self._cache is not None or not self.shares_cache else shared_cache()
        cached = False
        if cache is None or cache.policy == "off":
            reply = await self._ask(call, trial, recorder)
        else:
            reply, cached = await cache.get(
                self._cache_key(call, trial),
                lambda: self._ask(call, trial, recorder),
                lambda found: self._fits(call, found),
            )
            if cached and reply.usage is not None:
                # The tokens are what the answer took; the money was paid the first time.
                reply = replace(reply, usage=replace(reply.usage, cost_usd=0.0))
        if recorder is not None:
            recorder.record(
                PromptExecuted(
                    call.prompt_name,
                    self._name,
                    reply.model or self._model,
                    reply.usage,
                    reply.finish_reason,
                    reply.tokens,
                    cached,
                ),
                actor=call.actor,
            )
        if reply.refusal is not None:
            raise ModelRefusedError(f"{self._name} model {self._model!r} declined to answer: {reply.refusal}")
        return reply

    async def _ask(self, call: ModelCall, trial: TrialContext | None, recorder: Session | None) -> ModelReply:
        """Send until there is an answer, or no point in trying again."""
        failures = refusals = 0
        while True:
            await self._check_budgets(call, trial, recorder)
            async with self._limiter.slot() as permit:
                began, outcome = time.monotonic(), "answered"
                try:
                    reply = await self._send(call)
                except RateLimitedError as error:
                    outcome = "rate_limited"
                    self._limiter.report(permit, "rate_limited", retry_after=error.retry_after)
                    failed: ModelError = error
                    refusals += 1
                except ModelError as error:
                    outcome = "failed"
                    self._limiter.report(permit, "failed" if error.retryable else "answered")
                    failed = error
                    failures += 1
                else:
                    self._limiter.report(permit, "answered")
                    prices = self._given_prices()
                    if prices is not None and reply.usage is not None:
                        reply = replace(reply, usage=replace(reply.usage, cost_usd=prices.cost(reply.usage)))
                    if self._token_limiter is not None and reply.usage is not None:
                        self._token_limiter.used(permit, reply.usage.total_tokens)
                    if self._run_budget is not None:
                        self._spending.add(_run_id(trial), reply.usage)
                    if reply.usage is None or reply.usage.cost_usd is None:
                        self._note_unknown_cost()
                    return reply
                finally:
                    MODEL_CALL_SECONDS.observe(time.monotonic() - began, self._name, self._model, outcome)
            pause = self._retry.pause(failed, failures, refusals)
            if pause is None or (_deadline(trial, call) <= time.monotonic() + pause):
                # With no time left to try again, the cause is worth more than a timeout.
                raise failed
            if recorder is not None:
                said = f"{type(failed).__name__}: {failed}"
                recorder.record(
                    ModelCallFailed(call.prompt_name, self._name, self._model, said, round(pause, 3)), actor=call.actor
                )
            await anyio.sleep(pause)

    def _note_unknown_cost(self) -> None:
        """Warn, once, that a budget of dollars cannot count a call."""
        first, self._cost_unknown = not self._cost_unknown, True
        if first and any(budget.cost_usd is not None for budget in self._budgets):
            log.warning(
                "the cost of calls to %s model %r is not known: its budget of dollars does not count them. Give "
                "prices=Prices(...), or Budget(strict=True) to refuse such calls",
                self._name,
                self._model,
            )

    @property
    def _budgets(self) -> list[Budget]:
        return [budget for budget in (self._trial_budget, self._run_budget) if budget is not None]

    async def _check_budgets(self, call: ModelCall, trial: TrialContext | None, recorder: Session | None) -> None:
        if self._cost_unknown and any(budget.strict and budget.cost_usd is not None for budget in self._budgets):
            raise BudgetExceededError(
                f"the cost of calls to {self._name} model {self._model!r} is not known, so that a budget of dollars "
                "cannot be kept: give prices=Prices(...), or a budget that is not strict"
            )
        if self._trial_budget is not None and recorder is not None:
            self._trial_budget.check(*spent_in(recorder, call.actor), "trial's")
        if self._run_budget is not None:
            await self._spending.refresh(_run_id(trial))
            self._run_budget.check(*self._spending.of(_run_id(trial)), "run's")

    def _cache_key(self, call: ModelCall, trial: TrialContext | None) -> str:
        schema = output_schema(call.output_type)
        content = digest(
            [
                self._name,
                self._base_url,
                self._model,
                to_json(call.messages),
                to_json(call.tools),
                None if schema is None else schema.schema,
                to_json(call.params),
                self._cache_salt(),
            ]
        )
        if trial is None:
            return digest([content, 0, 0])
        # A judge's calls are counted by themselves: scoring a stored output makes no others, and must find them.
        asked = content if call.actor != JUDGE else f"{JUDGE} {content}"
        return digest([asked, trial.key.repeat, trial.count_call(asked)])

    def _cache_salt(self) -> Any:
        """What else of the adapter changes its answers."""
        return None

    def _fits(self, call: ModelCall, reply: ModelReply) -> bool:
        """Whether an answer is worth keeping: refusals and answers that can't be read are not."""
        try:
            self._parse(call, reply)
        except CodecError:
            return False
        return reply.refusal is None

    def _parse(self, call: ModelCall, reply: ModelReply) -> Any:
        # A model that calls tools has not answered yet.
        if call.output_type is str or reply.message.tool_calls or reply.refusal is not None:
            return None if reply.message.tool_calls else reply.message.text
        schema = output_schema(call.output_type) if self.wraps_outputs else None
        return parse_output(call.output_type, reply.message.text, wrapped=schema is not None and schema.wrapped)

    def _repaired(
        self, call: ModelCall, problem: str, first: ModelReply, second: ModelReply, recorder: Session | None
    ) -> Any:
        try:
            output, failure = self._parse(call, second), None
        except CodecError as error:
            output, failure = None, error
        if recorder is not None:
            event = OutputRepaired(call.prompt_name, problem, first.message.text, failure is None)
            recorder.record(event, actor=call.actor)
        if failure is not None:
            kind = getattr(call.output_type, "__name__", str(call.output_type))
            raise OutputParseError(
                f"{self._name} model {self._model!r} did not answer with a {kind}, even when asked again: {failure}",
                raw=second.message.text,
            ) from failure
        return output

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._model!r}>"


def _deadline(trial: TrialContext | None, call: ModelCall) -> float:
    # The deadline is the task's; scoring has its own time.
    return float("inf") if trial is None or call.actor == JUDGE else trial.deadline


def _run_id(trial: TrialContext | None) -> str:
    return "" if trial is None else trial.key.run_id


def _recorder(session: Session | SessionView | None, actor: str) -> tuple[Session | None, str]:
    """Where to record. Evaluators hold views, which nothing can be written to: theirs is the trial's, as a judge."""
    if isinstance(session, Session):
        return session, actor
    trial = running_trial()
    return (None if trial is None else trial.session), (actor if session is None else JUDGE)
