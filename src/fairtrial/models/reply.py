"""Requests to models and their replies, independent of the provider."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fairtrial.base.codec.encode import PRIVATE
from fairtrial.base.frozen import EMPTY
from fairtrial.data.attachment import Attachment
from fairtrial.data.session.events import TokenUsage
from fairtrial.data.session.trajectory import ChatMessage
from fairtrial.models.adapter import ToolSpec
from fairtrial.models.pricing import NO_EXTRAS, UsageExtras
from fairtrial.models.token_ids import SampledTokens


@dataclass(frozen=True, slots=True)
class ModelCall:
    """One request to a model."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[ToolSpec, ...] = ()
    output_type: Any = str
    params: Mapping[str, Any] = EMPTY
    prompt_name: str = ""
    actor: str = "task"
    embeds: bool = False  # The messages are texts to embed; the text of the reply is their vectors as JSON.


@dataclass(frozen=True, slots=True)
class ModelReply:
    """One reply of a model.

    `refusal` is the text of a refusal, if the model declined to answer; `tokens` refers to token ids and
    log-probabilities, if they were requested; `sampled` are the tokens for training, `extras` the parts of the usage
    with prices of their own: both are never cached.
    """

    message: ChatMessage
    usage: TokenUsage | None = None
    finish_reason: str | None = None
    model: str = ""
    refusal: str | None = None
    tokens: Attachment | None = None
    sampled: SampledTokens | None = field(default=None, metadata=PRIVATE)
    extras: UsageExtras = field(default=NO_EXTRAS, compare=False, metadata=PRIVATE)
