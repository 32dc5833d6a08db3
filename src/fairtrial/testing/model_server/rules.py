"""Which reply answers which request."""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from fairtrial.testing.model_server.record import Record
from fairtrial.testing.model_server.reply import Reply, ToolCall
from fairtrial.testing.model_server.request import ParsedRequest
from fairtrial.testing.model_server.schema import minimal_instance

type Predicate = Callable[[ParsedRequest], bool]
"""Says whether a rule is for this request."""

type ReplyFunction = Callable[[ParsedRequest], Reply | str | Awaitable[Reply | str | None] | None]
"""Makes a reply, or None to leave the request to the next rule. It runs in the server's event loop: do not block."""

type Where = Literal["last_user", "last", "system", "conversation", "anywhere"]
"""The text a pattern is looked for in."""


@dataclass(frozen=True, slots=True)
class Script(Record):
    """Replies in order.

    `per` says whose order: the server's ("server"), each conversation's own ("conversation", see
    `ParsedRequest.conversation`), or the number of assistant messages already in the request ("turn"). With "turn" a
    retried request gets the same reply again, whatever the timing; the other two move on with every reply given.
    When the script is over, `then` repeats the last reply or passes to the next rule.
    """

    replies: tuple[Reply | str, ...]
    per: Literal["server", "conversation", "turn"] = "server"
    then: Literal["pass", "repeat_last"] = "pass"

    def __post_init__(self) -> None:
        if not self.replies:
            raise ValueError("a Script needs at least one reply")


@dataclass(frozen=True, slots=True)
class Rule(Record):
    """A reply for the requests that match.

    `when` is a regular expression looked for in the text that `where` names, or a predicate.
    """

    when: str | Predicate
    reply: Reply | str | Script | ReplyFunction
    where: Where = "last_user"

    def __post_init__(self) -> None:
        if isinstance(self.when, str):
            check_pattern(self.when)


type Replies = str | Reply | Script | Rule | ReplyFunction | Sequence[Reply | str | Rule | Script] | None
"""What a server may be told to say: one reply for all, a function, or None for an echo of the last user message.

A list is either of replies and texts, said in order, or of rules and scripts, tried in order; not of both.
"""


def check_pattern(pattern: str) -> None:
    """Raises ValueError if this is not a regular expression."""
    try:
        re.compile(pattern)
    except re.error as problem:
        raise ValueError(f"not a regular expression: {pattern!r}: {problem}") from None


def matches(when: str | Predicate, where: Where, request: ParsedRequest) -> bool:
    """Whether the pattern is found in the text, or the predicate holds."""
    if not isinstance(when, str):
        return when(request)
    if where == "anywhere":
        return any(re.search(when, message.text) for message in request.messages)
    if where == "last":
        return request.last is not None and re.search(when, request.last.text) is not None
    text = {"last_user": request.last_user, "system": request.system, "conversation": request.conversation}[where]
    return re.search(when, text) is not None


def normalise(replies: Replies) -> tuple[Rule, ...]:
    """The rules that `replies` stands for."""
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
                "replies must be a list of Reply and str (said in order) or a list of Rule and Script (tried in order);"
                f" found {type(item).__name__} beside other things"
            )
    return tuple(rules)


class Speaker:
    """Chooses the reply of each request. Remembers how far each script has come, and nothing else."""

    def __init__(self, rules: tuple[Rule, ...]) -> None:
        self._rules = rules
        self._said: dict[tuple[int, str], int] = {}

    def reset(self) -> None:
        """Starts every script again."""
        self._said.clear()

    async def reply(self, request: ParsedRequest) -> Reply:
        """The reply of the first rule that has one; else what the request demands (a tool, a schema); else an echo."""
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
    """The reply when no rule has one: the smallest that satisfies the request, or an echo of the last user message."""
    if request.required_tool is not None:
        for tool in request.tools:
            if request.required_tool in ("", tool.name):
                return Reply(tool_calls=(ToolCall(tool.name, minimal_instance(tool.parameters)),))
    if request.output_schema is not None:
        return Reply(output=minimal_instance(request.output_schema))
    return Reply(request.last_user)
