"""Policies: chat with a model, a model in this process."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import anyio
from anyio import to_thread

from fairtrial.base.codec import to_json
from fairtrial.data.session.events import TokenUsage
from fairtrial.data.session.trajectory import ChatMessage, ToolCall, from_chat
from fairtrial.errors import ConfigurationError
from fairtrial.models.adapter import ModelCall, ModelReply, ProviderAdapter, SampledTokens, ToolSpec
from fairtrial.models.base import BaseAdapter
from fairtrial.suites.suite import EvalSuite
from fairtrial.trials.context import running_trial
from fairtrial.trials.task import WITH_ADAPTER


def with_adapter(suite: EvalSuite, adapter: ProviderAdapter) -> Any:
    """Return the task of a suite with another model.

    Raises:
        ConfigurationError: the task is no `agent_task` and no `prompt_task`.
    """
    make: Callable[[ProviderAdapter], Any] | None = getattr(suite.prepared().rules.tasks[0].fn, WITH_ADAPTER, None)
    if make is None:
        raise ConfigurationError(
            f"the task of suite {suite.name!r} must be an agent_task or a prompt_task, so that the model of the "
            "trainer can take the place of its own"
        )
    return make(adapter)


type ChatRow = dict[str, Any]
"""A message as trainers read it: role, content, `tool_calls` with functions, `tool_call_id`."""


def to_chat(message: ChatMessage) -> ChatRow:
    """Return a message in the chat format of trainers; its reasoning, if any, as `reasoning_content`.

    Raises:
        ConfigurationError: the message has attachments, which text formats cannot hold.
    """
    if not isinstance(message.content, str) and any(not isinstance(part, str) for part in message.content):
        raise ConfigurationError(f"a message for training must be text (got a {message.role} message with attachments)")
    row: ChatRow = {"role": message.role, "content": message.text}
    if message.reasoning:
        row["reasoning_content"] = message.reasoning
    if message.tool_calls:
        row["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": to_json(call.arguments)}}
            for call in message.tool_calls
        ]
    if message.role == "tool":
        row["tool_call_id"] = message.name
    elif message.name:
        row["name"] = message.name
    return row


def tool_rows(specs: Iterable[ToolSpec]) -> list[dict[str, Any]]:
    """Return tools in the format of chat templates."""
    functions = [
        {"name": one.name, "description": one.description, "parameters": to_json(one.parameters)} for one in specs
    ]
    return [{"type": "function", "function": function} for function in functions]


def messages_of(conversation: str | Sequence[Any], *, role: str) -> list[ChatMessage]:
    """Return a prompt or a completion as messages; a text is one message of `role`."""
    if isinstance(conversation, str):
        return [ChatMessage(role, conversation)]
    return [one if isinstance(one, ChatMessage) else from_chat(one, sampled=True) for one in conversation]


def split_prompt(messages: Sequence[ChatMessage]) -> tuple[list[ChatMessage], list[ChatMessage]]:
    """Return the messages before the first of the assistant, and the rest."""
    first = next((at for at, message in enumerate(messages) if message.role == "assistant"), len(messages))
    return list(messages[:first]), list(messages[first:])


type ParseReply = Callable[[str], ChatMessage]
"""Makes the message of the assistant from the text that the model wrote."""

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_PROBE = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})


def parse_tool_calls(text: str) -> ChatMessage:
    """Read tool calls as Qwen and Hermes models write them: JSON between `<tool_call>` and `</tool_call>`."""
    calls: list[ToolCall] = []
    for place, found in enumerate(_CALL.findall(text)):
        try:
            tree = json.loads(found)
            calls.append(ToolCall(str(tree["name"]), dict(tree.get("arguments") or {}), f"call_{place}"))
        except (ValueError, KeyError, TypeError, AttributeError):
            return ChatMessage("assistant", text)  # Not JSON: an ordinary answer, which is scored as such.
    return ChatMessage("assistant", _CALL.sub("", text).strip() if calls else text, tuple(calls))


class LocalModelAdapter(BaseAdapter):
    """A model of transformers in this process, one answer at a time.

    The prompt of a later turn is the prompt and the completion of the turn before, token by token, and the tokens of
    the new messages: what was sampled is never tokenized again.

    Args:
        model: The model.
        tokenizer: Its tokenizer, with a chat template.
        max_new_tokens: The longest answer.
        temperature: The temperature.
        tokens: Record the tokens for training.
        parse: Makes a message from the text of an answer.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        tokens: bool = False,
        parse: ParseReply = parse_tool_calls,
    ) -> None:
        super().__init__(name="local", model="policy")
        self._network = model
        self._tokenizer = tokenizer
        self._max_new_tokens = max_new_tokens
        self._temperature = temperature
        self._tokens = tokens
        self._parse_reply = parse
        self._turn = anyio.Lock()
        self._held: dict[Any, tuple[int, list[int]]] = {}

    async def _send(self, call: ModelCall) -> ModelReply:
        trial = running_trial()
        key = None if trial is None else (trial.key, trial.attempt, call.actor)
        prompt = self._prompt(call, key)
        async with self._turn:
            sampled, logprobs = await to_thread.run_sync(partial(self._generate, prompt))
        if key is not None:
            self._held[key] = (len(call.messages), [*prompt, *sampled])
        ended = bool(sampled) and sampled[-1] == self._tokenizer.eos_token_id
        text = self._tokenizer.decode(sampled[:-1] if ended else sampled, skip_special_tokens=True)
        message = self._parse_reply(text)
        reason = "tool_calls" if message.tool_calls else "stop" if ended else "length"
        tokens = SampledTokens(prompt, sampled, logprobs) if self._tokens else None
        return ModelReply(message, TokenUsage(len(prompt), len(sampled)), reason, "policy", sampled=tokens)

    def _prompt(self, call: ModelCall, key: Any) -> list[int]:
        chat = [to_chat(message) for message in call.messages]
        tools = tool_rows(call.tools) or None
        count, held = self._held.get(key, (0, []))
        if key is None or not held:
            return list(self._encode(self._render(chat, tools)))
        # One message of the assistant has been added to those of the last call; the rest is new.
        new = self._render([*_PROBE, *chat[count + 1 :]], tools)
        before = self._render(list(_PROBE), tools, answer=False)
        end = self._tokenizer.eos_token
        kept = before[: before.rfind(end) + len(end)] if end in before else before
        if not new.startswith(kept):
            raise ConfigurationError(
                "the chat template must not change earlier messages when a conversation goes on (it does)\n"
                "use a template for training, as TRL has them in trl/chat_templates"
            )
        closed = [] if held[-1] == self._tokenizer.eos_token_id else [self._tokenizer.eos_token_id]
        return [*held, *closed, *self._encode(new[len(kept) :])]

    def _render(self, chat: Sequence[Any], tools: Any, *, answer: bool = True) -> str:
        return str(self._tokenizer.apply_chat_template(chat, tools=tools, add_generation_prompt=answer, tokenize=False))

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _generate(self, prompt: list[int]) -> tuple[list[int], list[float]]:
        import torch

        given = torch.tensor([prompt], device=self._network.device)
        with torch.no_grad():
            made = self._network.generate(
                given,
                attention_mask=torch.ones_like(given),
                do_sample=True,
                temperature=self._temperature,
                top_k=0,
                top_p=1.0,
                max_new_tokens=self._max_new_tokens,
                pad_token_id=self._tokenizer.pad_token_id,
                return_dict_in_generate=True,
                output_logits=True,
            )
        sampled: list[int] = made.sequences[0, len(prompt) :].tolist()
        logprobs = [
            float(torch.log_softmax(row[0].float() / self._temperature, -1)[token])
            for row, token in zip(made.logits, sampled, strict=True)
        ]
        return sampled, [min(value, 0.0) for value in logprobs]
