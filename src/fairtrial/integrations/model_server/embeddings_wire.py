"""OpenAI's embeddings API."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from fairtrial.integrations.model_server.draw import draw
from fairtrial.integrations.model_server.openai_wire import OpenAIWire
from fairtrial.integrations.model_server.reply import Reply, Usage
from fairtrial.integrations.model_server.request import (
    InvalidRequestError,
    ParsedRequest,
    digest_of,
    parse_messages,
    required,
)

_DIMENSIONS = 64
_WORD = re.compile(r"\w+")


class EmbeddingsWire(OpenAIWire):
    """Reads `POST /v1/embeddings` and answers with a vector of the words of each text.

    Each word adds a fixed pseudo-random vector, so texts with the same words have a cosine of 1 and texts without a
    common word one near 0.
    """

    def parse(self, body: Mapping[str, Any], *, number: int, raw: bytes, headers: Mapping[str, str]) -> ParsedRequest:
        """The request in neutral form: one message of the user per text."""
        model = required(body, "model", str)
        given = body.get("input")
        texts = [given] if isinstance(given, str) else given
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
            raise InvalidRequestError("input: a text or a list of texts that are not empty is required")
        dimensions = body.get("dimensions", _DIMENSIONS)
        if not isinstance(dimensions, int) or not 1 <= dimensions <= 4096:
            raise InvalidRequestError("dimensions: a whole number from 1 to 4096 is required")
        messages = parse_messages([{"role": "user", "content": text} for text in texts])
        return ParsedRequest(number, self.name, model, messages, body, digest_of(raw), len(raw), headers=headers)

    def completion(self, request: ParsedRequest, reply: Reply, usage: Usage) -> dict[str, Any]:
        """The body of an answer."""
        dimensions = request.body.get("dimensions", _DIMENSIONS)
        data = [
            {"object": "embedding", "index": place, "embedding": word_vector(message.text, dimensions)}
            for place, message in enumerate(request.messages)
        ]
        counts = {"prompt_tokens": usage.input_tokens, "total_tokens": usage.input_tokens}
        return {"object": "list", "data": data, "model": request.model, "usage": counts}


def word_vector(text: str, dimensions: int = _DIMENSIONS) -> list[float]:
    """Return a vector of length 1 that depends only on the words of a text, whatever their order and case."""
    words = _WORD.findall(text.casefold()) or [text]
    vector = [math.fsum(draw(0, f"{word} {place}", 0) - 0.5 for word in words) for place in range(dimensions)]
    length = math.sqrt(math.fsum(number * number for number in vector)) or 1.0
    return [number / length for number in vector]
