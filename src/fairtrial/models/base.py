"""The base class of all adapters: retries, limits, budgets, cache and recording of model calls."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Generic, Self

import anyio

from fairtrial.base.codec import decode, digest, to_json
from fairtrial.base.frozen import EMPTY
from fairtrial.base.metrics import MODEL_CALL_SECONDS
from fairtrial.base.sync_bridge import call_sync
from fairtrial.data.session.events import PromptExecuted, TokenUsage, ending_of
from fairtrial.data.session.session import Session
from fairtrial.data.session.trajectory import ChatMessage
from fairtrial.data.session.views import JUDGE, SessionView
from fairtrial.errors import (
    BudgetExceededError,
    CodecError,
    ConfigurationError,
    MalformedReplyError,
    ModelError,
    ModelRefusedError,
    ModelUnavailableError,
    OutputParseError,
    RateLimitedError,
)
from fairtrial.models.adapter import AnswerT, Completion, ModelCall, ModelReply, OutputT, PromptResponse, ToolSpec
from fairtrial.models.cache import ResponseCache, cache_disabled, shared_cache
from fairtrial.models.limiter import (
    NO_RETRY,
    Budget,
    Limiter,
    RetryPolicy,
    Spending,
    SpendingLog,
    TokenLimiter,
    Unlimited,
    spent_in,
)
from fairtrial.models.pricing import Prices, configured_prices
from fairtrial.models.prompt import Prompt
from fairtrial.models.schema import OutputRepaired, output_schema, parse_output, repair_messages
from fairtrial.trials.context import TrialContext, running_trial

log = logging.getLogger("fairtrial.models")

_MAX_PAUSES = 20
_NO_LIMIT = Unlimited()  # Of calls in batches, which wait for hours without anything under way.

type BatchSend = Callable[[], Awaitable[ModelReply | None]]
"""Sends a call in a batch; returns None if it is to be sent at once instead."""


@dataclass(frozen=True, slots=True)
class ModelCallFailed:
    """A model call failed and was retried after a pause."""

    prompt_name: str
    adapter: str
    model: str
    error: str
    pause_seconds: float


# Attributes of adapters that do not influence answers.
_STATE = frozenset(
    (
        "_retry", "_limiter", "_token_limiter", "_cache", "_trial_budget", "_run_budget", "_spending", "_prices",
        "_cost_unknown", "_key", "_timeout", "_stream", "_prices_of", "_lock", "_clients", "_warned", "_calls",
        "_batch", "_batch_calls",
    )
)  # fmt: skip


class BaseAdapter(Generic[AnswerT]):  # noqa: UP046 - they have defaults
    """The base class of adapters. Subclasses implement `_send`.

    Args:
        name: The provider.
        model: The model.
        params: Sampling parameters of every call, with the provider's names.
        retry: The retry policy of failed calls; by default they are not repeated.
        limiter: Limits the number of concurrent calls.
        cache: The cache of responses.
        trial_budget: The budget of one trial for all adapters and all its attempts.
        run_budget: The budget of one run for this adapter.
        spending: The usage that counts towards `run_budget`; by default that of this adapter. Adapters, or a fleet,
            with the same object share the budget.
        prices: The prices of the model, if no price list has it or other prices apply.
    """

    wraps_outputs: ClassVar[bool] = False  # Whether outputs that are not objects are sent under "value".
    can_embed: ClassVar[bool] = False  # Whether `_send` understands calls that embed.
    shares_cache: ClassVar[bool] = False  # Whether it uses the cache of the process if it has none.

    def __init__(
        self,
        *,
        name: str,
        model: str,
        base_url: str = "",
        params: Mapping[str, Any] = EMPTY,
        retry: RetryPolicy | None = None,
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
        self._retry = NO_RETRY if retry is None else retry
        self._limiter = Unlimited() if limiter is None else limiter
        self._token_limiter = self._limiter if isinstance(self._limiter, TokenLimiter) else None
        self._cache = cache
        self._trial_budget = trial_budget
        self._run_budget = run_budget
        self._spending = Spending() if spending is None else spending
        self._prices = prices
        self._cost_unknown = False

    def __fairtrial_identity__(self) -> dict[str, Any]:
        """Return the parameters that influence answers; clients, limits, budgets and keys do not."""
        return {name: value for name, value in sorted(vars(self).items()) if name not in _STATE}

    @property
    def has_price(self) -> bool | None:
        """Whether the price of its calls is known; None if only the answers can show it."""
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

    def _batch_send(self, call: ModelCall, trial: TrialContext | None) -> BatchSend | None:
        """Return what sends this call in a batch of the provider; None if it is sent at once."""
        return None

    async def _answered_by_cache(self, call: ModelCall, trial: TrialContext | None) -> None:
        """Do what must be done for a call that is not sent, because the cache has answered it."""

    async def aclose(self) -> None:
        """Close connections; they are reopened on next use."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.aclose()

    async def complete(
        self,
        messages: str | Sequence[ChatMessage | Mapping[str, Any]],
        *,
        tools: Sequence[ToolSpec] = (),
        output_type: type[OutputT] = str,  # type: ignore[assignment]  # the default of OutputT is str
        params: Mapping[str, Any] = EMPTY,
        session: Session | SessionView | None = None,
        actor: str = "task",
        prompt_name: str = "",
    ) -> Completion[OutputT]:
        """Call the model once: `(await adapter.complete("Say hello.")).text`.

        Args:
            messages: The conversation: `ChatMessage`s or mappings such as `{"role": "user", "content": "Say hello."}`.
                A text is one message of the user.
            tools: The tools that the model may call; a reply with tool calls has no output yet.
            output_type: Any type that can be read from JSON. If the reply does not match, the model is asked once to
                repair it.
            params: Sampling parameters, in addition to the adapter's own.
            session: The session that records the call; by default that of the running trial.
            actor: The caller: "task" or "judge".
            prompt_name: The name of the call in the session.
        """
        recorder, actor = _recorder(session, actor)
        merged = {**self._params, **params} if params else self._params
        call = ModelCall(_conversation(messages), tuple(tools), output_type, merged, prompt_name, actor)
        reply = await self._answer(call, recorder)
        if ending_of(reply.finish_reason) == "paused":
            reply = await self._continue(call, reply, recorder)
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

    def complete_sync(
        self,
        messages: str | Sequence[ChatMessage | Mapping[str, Any]],
        *,
        tools: Sequence[ToolSpec] = (),
        output_type: type[OutputT] = str,  # type: ignore[assignment]  # the default of OutputT is str
        params: Mapping[str, Any] = EMPTY,
        prompt_name: str = "",
    ) -> Completion[OutputT]:
        """Blocking version of `complete`."""
        call = partial(self.complete, messages, tools=tools, output_type=output_type, params=params)
        return call_sync(partial(call, prompt_name=prompt_name))

    async def embed(
        self,
        texts: Sequence[str],
        *,
        params: Mapping[str, Any] = EMPTY,
        session: Session | SessionView | None = None,
        actor: str = "task",
        prompt_name: str = "embed",
    ) -> tuple[tuple[float, ...], ...]:
        """Return one vector per text, from an embedding model. Retries, limits, budgets and cache apply.

        Args:
            texts: The texts, none of them empty.
            params: Parameters of the call, such as `{"dimensions": 256}`; those of the adapter do not apply.
            session: The session that records the call; by default that of the running trial.
            actor: The caller: "task" or "judge".
            prompt_name: The name of the call in the session.
        """
        if not self.can_embed:
            raise ConfigurationError(
                f"{type(self).__name__} has no embeddings: use an OpenAIAdapter of an embedding model, with "
                "base_url=... for other servers"
            )
        given: Sequence[Any] = texts
        if isinstance(texts, str) or not given or not all(isinstance(text, str) and text.strip() for text in given):
            raise ConfigurationError(f"embed needs a list of texts that are not empty (got {texts!r})")
        recorder, actor = _recorder(session, actor)
        messages = tuple(ChatMessage("user", text) for text in texts)
        reply = await self._answer(ModelCall(messages, (), str, params, prompt_name, actor, embeds=True), recorder)
        vectors = decode(tuple[tuple[float, ...], ...], reply.message.text)
        if len(vectors) != len(texts) or len({len(vector) for vector in vectors}) != 1 or not vectors[0]:
            raise MalformedReplyError(
                f"{self._name} model {self._model!r} must return one vector per text, all of one length (got "
                f"{len(vectors)} for {len(texts)} texts, of lengths {sorted({len(vector) for vector in vectors})})"
            )
        return vectors

    async def evaluate[O](
        self, prompt: Prompt[O], *, session: Session | SessionView | None = None, actor: str = "task"
    ) -> PromptResponse[O]:
        """Call the model with a bound prompt; returns the typed output."""
        completion: Completion[O] = await self.complete(
            prompt.messages, output_type=prompt.output_type, session=session, actor=actor, prompt_name=prompt.name
        )
        if completion.message.tool_calls:
            raise OutputParseError(f"prompt {prompt.name!r} was answered with tool calls", raw=completion.raw)
        return PromptResponse(completion.output, completion)  # type: ignore[arg-type]  # None only where O is None

    async def _continue(self, call: ModelCall, reply: ModelReply, recorder: Session | None) -> ModelReply:
        """Send the message of a paused answer back until the answer is complete."""
        message, usage = reply.message, reply.usage
        for _ in range(_MAX_PAUSES):
            reply = await self._answer(replace(call, messages=(*call.messages, message)), recorder)
            message = self._joined(message, reply.message)
            usage = reply.usage if usage is None else usage + (reply.usage or TokenUsage())
            if ending_of(reply.finish_reason) != "paused":
                return replace(reply, message=message, usage=usage)
        raise ModelUnavailableError(
            f"{self._name} model {self._model!r} paused {_MAX_PAUSES} times without a complete answer"
        )

    def _joined(self, first: ChatMessage, second: ChatMessage) -> ChatMessage:
        """Return the message of an answer that was paused in between."""
        reasoning = "\n\n".join(filter(None, (first.reasoning, second.reasoning)))
        return ChatMessage("assistant", first.text + second.text, second.tool_calls, reasoning=reasoning)

    async def _answer(self, call: ModelCall, recorder: Session | None) -> ModelReply:
        trial = running_trial()
        cache = self._response_cache()
        cached = False
        timing = _Timing()
        if cache is None or cache.policy == "off" or (call.actor != JUDGE and cache_disabled()):
            reply = await self._ask(call, trial, recorder, timing)
        else:
            reply, cached = await cache.get(
                self._cache_key(call, trial),
                lambda: self._ask(call, trial, recorder, timing),
                lambda found: self._fits(call, found),
            )
            if cached:
                await self._answered_by_cache(call, trial)
            if cached and reply.usage is not None:
                # A cached answer reports the tokens of the original call, but no cost.
                reply = replace(reply, usage=replace(reply.usage, cost_usd=0.0))
        reason = reply.finish_reason
        if reply.refusal is not None and ending_of(reason) != "refused":
            reason = "refusal"  # Some protocols have a field for refusals, beside any reason.
        if recorder is not None:
            recorder.record(
                PromptExecuted(
                    call.prompt_name,
                    self._name,
                    reply.model or self._model,
                    reply.usage,
                    reason,
                    reply.tokens,
                    cached,
                    timing.duration_ms,
                    timing.waited_ms,
                    self._model if reply.model and reply.model != self._model else "",
                ),
                actor=call.actor,
            )
            if reply.sampled is not None and call.actor != JUDGE:
                reply.sampled.record(recorder, call.params, actor=call.actor, model=reply.model or self._model)
        if reply.refusal is not None:
            raise ModelRefusedError(
                f"{self._name} model {self._model!r} declined to answer: {reply.refusal}", refusal=reply.refusal
            )
        return reply

    def _response_cache(self) -> ResponseCache | None:
        return self._cache if self._cache is not None or not self.shares_cache else shared_cache()

    async def _ask(
        self, call: ModelCall, trial: TrialContext | None, recorder: Session | None, timing: _Timing
    ) -> ModelReply:
        """Send the request, with retries."""
        batched = self._batch_send(call, trial)
        limiter, retry = (self._limiter, self._retry) if batched is None else (_NO_LIMIT, NO_RETRY)
        failures = refusals = timeouts = 0
        while True:
            await self._check_budgets(call, trial, recorder)
            async with limiter.slot() as permit:
                began, outcome = time.monotonic(), "answered"
                try:
                    sent = None if batched is None else await batched()
                    if batched is not None and sent is None:  # It is sent at once, as any other call.
                        outcome, batched, limiter, retry = "failed", None, self._limiter, self._retry
                        continue
                    reply = await self._send(call) if sent is None else sent
                    if ending_of(reply.finish_reason) == "failed":
                        self._count_lost(call, trial, recorder, self._priced(reply), reply.finish_reason)
                        raise ModelUnavailableError(
                            f"{self._name} model {self._model!r} failed while it was answering: it ended its answer "
                            f"with {reply.finish_reason!r}"
                        )
                except ModelRefusedError as error:
                    # A filter in front of the model refuses with a status of its own; usage is not reported then.
                    timing.answered(began)
                    limiter.report(permit, "answered")
                    self._count(trial, None)
                    message = ChatMessage("assistant", "")
                    return ModelReply(message, None, "content_filter", self._model, error.refusal or str(error))
                except RateLimitedError as error:
                    outcome = "rate_limited"
                    limiter.report(permit, "rate_limited", retry_after=error.retry_after)
                    failed: ModelError = error
                    refusals += 1
                except ModelError as error:
                    outcome = "failed"
                    limiter.report(permit, "failed" if error.retryable else "answered")
                    failed = error
                    failures += 1
                    timeouts += error.timed_out
                    if error.sent:
                        self._count_lost(call, trial, recorder, None, "timeout" if error.timed_out else "error")
                except anyio.get_cancelled_exc_class():
                    self._count_lost(call, trial, recorder, None, "timeout")
                    raise
                else:
                    if batched is None:
                        timing.answered(began)
                    else:  # The time in a batch says nothing about the model.
                        timing.waited_until(time.monotonic())
                    limiter.report(permit, "answered")
                    usage = self._priced(reply)
                    if usage is not reply.usage:
                        reply = replace(reply, usage=usage)
                    if self._token_limiter is not None and usage is not None and batched is None:
                        self._token_limiter.used(permit, usage.total_tokens)
                    self._count(trial, usage)
                    return reply
                finally:
                    MODEL_CALL_SECONDS.observe(time.monotonic() - began, self._name, self._model, outcome)
            pause = retry.pause(failed, failures, refusals, timeouts)
            if pause is None or (_deadline(trial, call) <= time.monotonic() + pause):
                # There is no time for another attempt: report the cause instead of a timeout.
                raise failed
            if recorder is not None:
                description = f"{type(failed).__name__}: {failed}"
                recorder.record(
                    ModelCallFailed(call.prompt_name, self._name, self._model, description, round(pause, 3)),
                    actor=call.actor,
                )
            await anyio.sleep(pause)

    def _priced(self, reply: ModelReply) -> TokenUsage | None:
        """Return the usage of a reply with the cost by given prices, if there are any."""
        prices, usage = self._given_prices(), reply.usage
        return usage if prices is None or usage is None else replace(usage, cost_usd=prices.cost(usage, reply.extras))

    def _count(self, trial: TrialContext | None, usage: TokenUsage | None) -> None:
        """Count a request towards the budgets."""
        if self._run_budget is not None:
            self._spending.add(_run_id(trial), usage)
        if usage is None or usage.cost_usd is None:
            self._note_unknown_cost()

    def _count_lost(
        self,
        call: ModelCall,
        trial: TrialContext | None,
        recorder: Session | None,
        usage: TokenUsage | None,
        reason: str | None,
    ) -> None:
        """Count a request without a usable answer, which the provider may charge for all the same."""
        self._count(trial, usage)
        if recorder is not None:
            event = PromptExecuted(call.prompt_name, self._name, self._model, usage, reason)
            recorder.record(event, actor=call.actor)

    def _note_unknown_cost(self) -> None:
        """Warn, once, that a budget of dollars cannot count a call."""
        first, self._cost_unknown = not self._cost_unknown, True
        if first and any(budget.cost_usd is not None for budget in self._budgets):
            log.warning(
                "the cost of calls to %s model %r is not known, so they do not count towards its budget in dollars: "
                "pass prices=Prices(...), or Budget(strict=True) to refuse such calls",
                self._name,
                self._model,
            )

    @property
    def _budgets(self) -> list[Budget]:
        return [budget for budget in (self._trial_budget, self._run_budget) if budget is not None]

    async def _check_budgets(self, call: ModelCall, trial: TrialContext | None, recorder: Session | None) -> None:
        if self._cost_unknown and any(budget.strict and budget.cost_usd is not None for budget in self._budgets):
            raise BudgetExceededError(
                f"the cost of calls to {self._name} model {self._model!r} is not known, so its strict budget in "
                "dollars cannot be checked: pass prices=Prices(...), or a budget that is not strict"
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
                [message.to_record() for message in call.messages],
                to_json(call.tools),
                None if schema is None else [schema.schema, schema.name, schema.strict],
                to_json(call.params),
                self._cache_salt(),
                *(("embed",) if call.embeds else ()),
            ]
        )
        if trial is None:
            return digest([content, None, 0, 0])
        # Calls of judges are counted separately: rescoring makes only those, and must find them in the cache.
        asked = content if call.actor != JUDGE else f"{JUDGE} {content}"
        # Equal prompts of different samples are independent draws. Run and experiment are left out: a run that is
        # repeated, and experiments that differ elsewhere, share replies.
        return digest([asked, trial.key.sample_id, trial.key.repeat, trial.count_call(asked)])

    def _cache_salt(self) -> Any:
        """Return further settings of the adapter that change its replies."""
        return None

    def _fits(self, call: ModelCall, reply: ModelReply) -> bool:
        """Return whether a reply may be cached: only one that is complete and can be read."""
        if reply.refusal is not None or ending_of(reply.finish_reason) != "complete":
            return False
        try:
            self._parse(call, reply)
        except CodecError:
            return False
        return True

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


def _conversation(messages: Any) -> tuple[ChatMessage, ...]:
    """Return the messages of a call.

    Raises:
        ConfigurationError: something is not a message.
    """
    if isinstance(messages, str):
        return (ChatMessage("user", messages),)
    if isinstance(messages, ChatMessage | Mapping) or not isinstance(messages, Iterable):
        raise ConfigurationError(
            f"messages must be a text or a list of ChatMessages (got {type(messages).__name__})\n{_MESSAGES}"
        )
    return tuple(
        message if isinstance(message, ChatMessage) else _message_of(place, message)
        for place, message in enumerate(messages)
    )


def _message_of(place: int, message: Any) -> ChatMessage:
    where = f"messages[{place}]"
    if not isinstance(message, Mapping):
        raise ConfigurationError(
            f"{where} must be a ChatMessage or a mapping (got {type(message).__name__})\n{_MESSAGES}"
        )
    if "role" not in message or "content" not in message or message.keys() - {"role", "content", "name"}:
        raise ConfigurationError(
            f"{where} must have 'role', 'content' and at most 'name' (got {', '.join(map(repr, message))})\n{_MESSAGES}"
        )
    try:
        return ChatMessage(**message)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{where}: {error}\n{_MESSAGES}") from None


_MESSAGES = (
    'as in complete([{"role": "user", "content": "Say hello."}]); tool calls and attachments need '
    'ChatMessage("user", ("Describe this.", Attachment.of(data)))'
)


class _Timing:
    """The start time and duration of a call."""

    __slots__ = ("_called", "duration_ms", "waited_ms")

    def __init__(self) -> None:
        self._called = time.monotonic()
        self.duration_ms: float | None = None
        self.waited_ms: float | None = None

    def answered(self, sent: float) -> None:
        """Note that the request sent at this time has just been answered."""
        self.duration_ms = _milliseconds(time.monotonic() - sent)
        self.waited_until(sent)

    def waited_until(self, end: float) -> None:
        """Note that the call has only waited until this time."""
        self.waited_ms = _milliseconds(end - self._called)


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _deadline(trial: TrialContext | None, call: ModelCall) -> float:
    # The deadline applies to the task; scoring has its own time limit.
    return float("inf") if trial is None or call.actor == JUDGE else trial.deadline


def _run_id(trial: TrialContext | None) -> str:
    return "" if trial is None else trial.key.run_id


def _recorder(session: Session | SessionView | None, actor: str) -> tuple[Session | None, str]:
    """Return the session that records a call, and its actor.

    Evaluators hold read-only views: their calls are recorded in the session of the trial, as those of a judge.
    """
    if isinstance(session, Session):
        return session, actor
    trial = running_trial()
    return (None if trial is None else trial.session), (actor if session is None else JUDGE)
