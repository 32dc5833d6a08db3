"""Batches sent by the official SDKs, and a strict check of what the server answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, Final

import anthropic
import openai
from anthropic.types.messages import MessageBatchIndividualResponse
from anthropic.types.messages.batch_create_params import Request
from openai.types import Batch
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming
from pydantic import BaseModel, TypeAdapter

from fairtrial.integrations.model_server import BatchOptions, ModelServer

SECONDS = 1000.0  # How long a batch of `Provider` takes.
CHAT: Final = "/v1/chat/completions"
RESPONSES: Final = "/v1/responses"
_BODIES: dict[str, TypeAdapter[Any]] = {
    CHAT: TypeAdapter(CompletionCreateParamsNonStreaming),
    RESPONSES: TypeAdapter(ResponseCreateParamsNonStreaming),
}
_REQUEST: TypeAdapter[Any] = TypeAdapter(Request)


def openai_client(server: ModelServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="test", max_retries=0)


def anthropic_client(server: ModelServer) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.base_url, api_key="test", max_retries=0)


def openai_lines(count: int, endpoint: str = CHAT, model: str = "small") -> list[dict[str, Any]]:
    """Lines of an input file, which ask "question 1", "question 2" and so on."""
    return [
        {
            "custom_id": f"r{number}",
            "method": "POST",
            "url": endpoint,
            "body": {"model": model, **_prompt(endpoint, f"question {number}")},
        }
        for number in range(1, count + 1)
    ]


def _prompt(endpoint: str, text: str) -> dict[str, Any]:
    return {"input": text} if endpoint == RESPONSES else {"messages": [{"role": "user", "content": text}]}


def anthropic_requests(count: int) -> list[Request]:
    """Requests of a message batch, which ask the same questions."""
    return [
        {
            "custom_id": f"r{number}",
            "params": {
                "model": "small",
                "max_tokens": 50,
                "messages": [{"role": "user", "content": f"question {number}"}],
            },
        }
        for number in range(1, count + 1)
    ]


def upload(client: openai.OpenAI, lines: list[dict[str, Any]] | bytes) -> str:
    """Upload an input file; returns its id."""
    content = lines if isinstance(lines, bytes) else "\n".join(map(json.dumps, lines)).encode()
    return client.files.create(file=("batch.jsonl", content), purpose="batch").id


def create_openai(client: openai.OpenAI, count: int = 3, *, metadata: dict[str, str] | None = None) -> str:
    """Upload and create a batch of chat completions; returns its id."""
    file_id = upload(client, openai_lines(count))
    batch = client.batches.create(
        input_file_id=file_id, endpoint=CHAT, completion_window="24h", metadata=metadata or openai.omit
    )
    return batch.id


def check_request(provider: str, row: dict[str, Any]) -> None:
    """Raise ValidationError unless the SDK's own types accept this request of a batch."""
    if provider == "anthropic":
        _REQUEST.validate_python(row)
    else:
        _BODIES[row["url"]].validate_python(row["body"])


def check_reply(kind: type[BaseModel], text: bytes | str) -> None:
    """Assert that an answer is exactly what the SDK's type says: strict types, and no field that it does not know."""
    value = TypeAdapter(kind).validate_json(text, strict=True)
    assert list(unknown_fields(value)) == []


def unknown_fields(value: object, path: str = "") -> Iterator[str]:
    """Yield the paths of all fields that the SDK's models do not have."""
    if isinstance(value, BaseModel):
        yield from (f"{path}.{name}" for name in value.model_extra or {})
        for name in type(value).model_fields:
            yield from unknown_fields(getattr(value, name), f"{path}.{name}")
    elif isinstance(value, list):
        for place, item in enumerate(value):
            yield from unknown_fields(item, f"{path}[{place}]")


def rows_of(text: str) -> list[dict[str, Any]]:
    """Parse the lines of a file of results."""
    return [json.loads(line) for line in text.splitlines()]


def ids_of(text: str) -> list[str]:
    """Return the custom_ids of a file of results, in its order."""
    return [row["custom_id"] for row in rows_of(text)]


class Provider:
    """A server whose clock only the test moves, and a client of each provider."""

    def __init__(self, stack: ExitStack, replies: Any = None, **options: Any) -> None:
        faults = options.pop("server_faults", ())
        batches = BatchOptions(options.pop("seconds", SECONDS), rate=0, **options)
        self.server = stack.enter_context(ModelServer(replies, batches=batches, faults=faults))
        self.openai = stack.enter_context(openai_client(self.server))
        self.anthropic = stack.enter_context(anthropic_client(self.server))

    def create_anthropic(self, count: int = 3) -> str:
        return self.anthropic.messages.batches.create(requests=anthropic_requests(count)).id

    def end(self) -> None:
        self.server.advance(SECONDS)

    def openai_results(self, batch_id: str) -> tuple[Batch, str, str]:
        """A batch of OpenAI with its output file and its error file."""
        batch = self.openai.batches.retrieve(batch_id)
        files = (batch.output_file_id, batch.error_file_id)
        output, errors = ("" if one is None else self.openai.files.content(one).text for one in files)
        return batch, output, errors

    def anthropic_results(self, batch_id: str) -> list[MessageBatchIndividualResponse]:
        return list(self.anthropic.messages.batches.results(batch_id))

    def billed(self) -> list[str]:
        return [request.custom_id for request in self.server.batches().executed]
