"""Token ids and log-probabilities as inference engines return them, with a tokenizer of bytes.

A conversation is rendered as one marker per message, the bytes of its content, and an end marker; so the prompt of each
turn begins with the prompt and the completion of the turn before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fairtrial.integrations.model_server.draw import draw
from fairtrial.integrations.model_server.reply import Reply
from fairtrial.integrations.model_server.request import InvalidRequestError, ParsedRequest

type Engine = Literal["vllm", "sglang"]
"""The inference engines whose token ids the server can return."""

_END, _CALLS, _THOUGHT, _MERGED = 256, 257, 258, 259
_ROLES = {"system": 260, "developer": 260, "user": 261, "assistant": 262, "tool": 263}
_CLAMPED = -9999.0


def check_request(engine: Engine | None, body: Mapping[str, Any]) -> None:
    """Refuse what the engine refuses: SGLang does not stream token ids."""
    if engine == "sglang" and body.get("stream") is True and body.get("return_token_ids") is True:
        raise InvalidRequestError("return_token_ids is not supported for streaming requests")


class SentTokens:
    """The tokens of one answer, as an engine sends them."""

    def __init__(self, engine: Engine, request: ParsedRequest, reply: Reply) -> None:
        self._engine = engine
        self._damage = reply.tokens
        self.prompt = prompt_ids([message.raw for message in request.messages], merged=self._damage == "retokenized")
        self.sampled = [*_content(reply), *([] if reply.reason == "length" else [_END])]

    def of_answer(self) -> dict[str, Any]:
        """The fields beside the choices."""
        return {"prompt_token_ids": self.prompt} if self._engine == "vllm" and self._damage != "ids_missing" else {}

    def of_choice(self) -> dict[str, Any]:
        """The fields of a choice."""
        if self._damage == "ids_missing":
            return {}
        if self._engine == "vllm":
            return {"token_ids": self.sampled}
        return {"prompt_token_ids": self.prompt, "response_token_ids": self.sampled}

    def logprobs(self) -> list[dict[str, Any]]:
        """The log-probability of each token."""
        found = [_entry(place, token) for place, token in enumerate(self.sampled)]
        if self._damage == "logprob_missing":
            return found[:-1]
        if self._damage in ("not_a_number", "clamped"):
            found[0]["logprob"] = None if self._damage == "not_a_number" else _CLAMPED
        return found

    def spread(self, chunks: Sequence[dict[str, Any]]) -> None:
        """Add the tokens to the chunks of a stream: those of the prompt to the first, the others as they come."""
        chunks[0] |= self.of_answer()
        ids, logprobs = self.of_choice().get("token_ids", []), self.logprobs()
        later, end = chunks[1:], 0
        for place, chunk in enumerate(later, 1):
            begin, end = end, len(self.sampled) * place // len(later)
            found = {"content": logprobs[begin:end], "refusal": None}
            chunk["choices"][0] |= {"logprobs": found, **({"token_ids": ids[begin:end]} if ids else {})}


def wanted(engine: Engine | None, request: ParsedRequest, reply: Reply) -> SentTokens | None:
    """Return the tokens of an answer, if the server has them and the client asks for them."""
    if engine is None or request.body.get("return_token_ids") is not True or reply.refusal is not None:
        return None
    return SentTokens(engine, request, reply)


def prompt_ids(messages: Sequence[Mapping[str, Any]], *, merged: bool = False) -> list[int]:
    """Return the ids of a conversation, up to where the model answers.

    Args:
        messages: The messages as they were sent.
        merged: Tokenize the first reply of the model differently, as engines do that render conversations again.
    """
    ids: list[int] = []
    for message in messages:
        body = _message(message)
        if merged and message["role"] == "assistant":
            body, merged = [_MERGED, *body[2:]], False
        ids += [_ROLES.get(message["role"], _ROLES["user"]), *body, _END]
    return [*ids, _ROLES["assistant"]]


def _message(message: Mapping[str, Any]) -> list[int]:
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    calls = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    thought = message.get("reasoning_content") or ""
    ids = [_THOUGHT, *_bytes(thought), _THOUGHT] if thought else []
    return [*ids, *_bytes(content), *_calls([(call.get("name"), call.get("arguments")) for call in calls])]


def _content(reply: Reply) -> list[int]:
    thought = [_THOUGHT, *_bytes(reply.reasoning), _THOUGHT] if reply.reasoning else []
    calls = _calls([(call.name, call.arguments_json) for call in reply.tool_calls])
    return [*thought, *_bytes(reply.content), *calls]


def _calls(calls: Sequence[tuple[Any, Any]]) -> list[int]:
    ids: list[int] = []
    for name, arguments in calls:
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except ValueError:
            pass
        ids += [_CALLS, *_bytes(json.dumps([name, arguments], sort_keys=True))]
    return ids


def _bytes(text: str) -> list[int]:
    return list(text.encode("utf-8", "surrogatepass"))


def _entry(place: int, token: int) -> dict[str, Any]:
    text = chr(token) if token < 128 else ""
    return {"token": text, "logprob": -draw("logprob", place, token), "bytes": [token % 256], "top_logprobs": []}
