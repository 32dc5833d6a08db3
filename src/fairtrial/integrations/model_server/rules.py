"""Rules that choose the reply to a request."""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from fairtrial.base.frozen import first_is
from fairtrial.integrations.model_server.record import Record
from fairtrial.integrations.model_server.reply import Reply, ToolCallReply
from fairtrial.integrations.model_server.request import ParsedRequest
from fairtrial.integrations.model_server.schema import minimal_instance

type Predicate = Callable[[ParsedRequest], bool]
"""Returns whether a rule matches a request."""

type ReplyFunction = Callable[[ParsedRequest], Reply | str | Awaitable[Reply | str | None] | None]
"""Returns a reply, or None to try the next rule. It runs in the server's event loop and must not block."""

type Where = Literal["last_user", "last", "system", "conversation", "anywhere"]
"""The text that a pattern is searched in."""


@first_is(tuple, list)
@dataclass(frozen=True, slots=True)
class Script(Record):
    """Replies in order.

    `per` selects the position in the script: one for the whole server ("server"), one for each conversation
    ("conversation", see `ParsedRequest.conversation`), or the number of assistant messages in the request ("turn").
    With "turn" a retried request always gets the same reply; the other two advance with every reply. At the end of the
    script, `then` repeats the last reply or continues with the next rule.
    """

    replies: tuple[Reply | str, ...]
    per: Literal["server", "conversation", "turn"] = "server"
    then: Literal["pass", "repeat_last"] = "pass"

    def __post_init__(self) -> None:
        if not self.replies:
            raise ValueError("a Script must have at least one reply (got none)")


@first_is(str, Callable)  # type: ignore[arg-type]  # `isinstance` takes it
@dataclass(frozen=True, slots=True)
class Rule(Record):
    """A reply for the requests that match.

    `when` is a regular expression that is searched in the text that `where` names, or a predicate.
    """

    when: str | Predicate
    reply: Reply | str | Script | ReplyFunction
    where: Where = "last_user"

    def __post_init__(self) -> None:
        if isinstance(self.when, str):
            check_pattern(self.when)


type Replies = str | Reply | Script | Rule | ReplyFunction | Sequence[Reply | str | Rule | Script] | None
"""The replies of a server: one reply for all requests, a function, or None for an echo of the last user message.

A list contains either replies and texts, sent in order, or rules and scripts, tried in order, but not both.
"""


def check_pattern(pattern: str) -> None:
    """Raise ValueError if this is not a regular expression."""
    try:
        re.compile(pattern)
    except re.error as problem:
        raise ValueError(f"invalid regular expression {pattern!r}: {problem}") from None


def matches(when: str | Predicate, where: Where, request: ParsedRequest) -> bool:
    """Return whether a request contains the pattern, or satisfies the predicate."""
    if not isinstance(when, str):
        return when(request)
    if where == "anywhere":
        return any(re.search(when, message.text) for message in request.messages)
    if where == "last":
        return request.last is not None and re.search(when, request.last.text) is not None
    text = {"last_user": request.last_user, "system": request.system, "conversation": request.conversation}[where]
    return re.search(when, text) is not None


def normalise(replies: Replies) -> tuple[Rule, ...]:
    """Convert replies to rules."""
    if replies is None:
        return ()
    if isinstance(replies, Rule):
        return (replies,)
    if isinstance(replies, str | Reply | Script) or callable(replies):
        return (Rule("", replies),)
    items: list[object] = list(replies)
    if not items:
        return ()
    said = [item for item in items if isinstance(item, str | Reply)]
    if len(said) == len(items):
        return (Rule("", Script(tuple(said))),)
    rules: list[Rule] = []
    for item in items:
        if isinstance(item, Rule):
            rules.append(item)
        elif isinstance(item, Script):
            rules.append(Rule("", item))
        else:
            raise TypeError(
                "replies must be a list of Reply and str (sent in order) or a list of Rule and Script (tried in order) "
                f"(got a list with {type(item).__name__} and others)"
            )
    return tuple(rules)


class Speaker:
    """Chooses the reply to each request. Its only state is the position in each script."""

    def __init__(self, rules: tuple[Rule, ...]) -> None:
        self._rules = rules
        self._said: dict[tuple[int, str], int] = {}

    def reset(self) -> None:
        """Restart every script."""
        self._said.clear()

    async def reply(self, request: ParsedRequest) -> Reply:
        """Return the reply of the first rule that has one, or `unscripted_reply`."""
        for index, rule in enumerate(self._rules):
            if not matches(rule.when, rule.where, request):
                continue
            found: Reply | str | None
            if isinstance(rule.reply, Script):
                found = self._next(index, rule.reply, request)
            elif isinstance(rule.reply, Reply | str):
                found = rule.reply
            else:
                made = rule.reply(request)
                found = await made if inspect.isawaitable(made) else made
            if isinstance(found, str):
                return Reply(found)
            if found is not None:
                return found
        return unscripted_reply(request)

    def _next(self, index: int, script: Script, request: ParsedRequest) -> Reply | str | None:
        if script.per == "turn":
            position = request.turn
        else:
            key = (index, request.conversation if script.per == "conversation" else "")
            position = self._said.get(key, 0)
            self._said[key] = position + 1
        if position < len(script.replies):
            return script.replies[position]
        return script.replies[-1] if script.then == "repeat_last" else None


def unscripted_reply(request: ParsedRequest) -> Reply:
    """Return the smallest reply with the required tool call or output schema, or an echo of the last user message."""
    if request.required_tool is not None:
        for tool in request.tools:
            if request.required_tool in ("", tool.name):
                return Reply(tool_calls=(ToolCallReply(tool.name, minimal_instance(tool.parameters)),))
    if request.output_schema is not None:
        return Reply(output=minimal_instance(request.output_schema))
    return Reply(request.last_user)
