"""What the model answers: by rules, by JSON Schema, to hosted evals."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fairtrial.base.frozen import first_is
from fairtrial.integrations.model_server.openai_wire import OpenAIWire
from fairtrial.integrations.model_server.reply import (
    InvalidRequestError,
    ParsedMessage,
    ParsedRequest,
    Record,
    Reply,
    ToolCallReply,
    Usage,
)

# Deep enough for any hand-written schema; one that needs more refers to itself without end.
_MAX_DEPTH = 24

_FORMATS = {
    "date-time": "2000-01-01T00:00:00Z",
    "date": "2000-01-01",
    "time": "00:00:00Z",
    "duration": "P0D",
    "email": "a@example.com",
    "hostname": "example.com",
    "ipv4": "127.0.0.1",
    "ipv6": "::1",
    "uri": "http://example.com/",
    "uuid": "00000000-0000-4000-8000-000000000000",
}

# Patterns are not solved; these values are tried, which match most patterns in tests.
_TRIALS = ("", "a", "A", "0", "1", "aa", "AA", "00", "aaa", "AAA", "000", "0000", "00000", "a1", "A1", "A-1", "a_a")


class UnsatisfiedSchemaError(InvalidRequestError):
    """No value was found for the schema; the test must define a reply."""


class _DeadError(Exception):
    """This branch of the schema has no value within the depth allowed."""


def minimal_instance(schema: Mapping[str, Any]) -> Any:
    """Return the smallest value that the schema allows: only required properties, first possible branch, least numbers.

    The same schema gives the same value. Raises `UnsatisfiedSchemaError` if no value is found.
    """
    try:
        return _instance(schema, schema, 0)
    except _DeadError as reason:
        raise UnsatisfiedSchemaError(
            f"no value found for the output schema ({reason}); add a rule to the server"
        ) from None


def _instance(schema: Any, root: Mapping[str, Any], depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise _DeadError("it refers to itself without end")
    if schema is True:
        return None
    if not isinstance(schema, Mapping):
        raise _DeadError(f"not a schema: {schema!r}")
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        if not schema["enum"]:
            raise _DeadError("an enum without values")
        return schema["enum"][0]
    if "$ref" in schema:
        siblings = {name: value for name, value in schema.items() if name != "$ref"}
        return _instance(_merged([_resolve(schema["$ref"], root), siblings], root, depth), root, depth + 1)
    if "allOf" in schema:
        rest = {name: value for name, value in schema.items() if name != "allOf"}
        return _instance(_merged([*schema["allOf"], rest], root, depth), root, depth + 1)
    for name in ("anyOf", "oneOf"):
        if name in schema:
            rest = {key: value for key, value in schema.items() if key != name}
            return _first([_merged([branch, rest], root, depth) for branch in schema[name]], root, depth)
    kind = schema.get("type")
    if isinstance(kind, list):
        return _first([{**schema, "type": one} for one in kind], root, depth)
    return _typed(kind or _implied_type(schema), schema, root, depth)


def _first(branches: list[Mapping[str, Any]], root: Mapping[str, Any], depth: int) -> Any:
    """Return the value of the first branch that has one, so that recursion ends in a branch without it."""
    reason = "no branch"
    for branch in branches:
        try:
            return _instance(branch, root, depth + 1)
        except _DeadError as dead:
            reason = str(dead)
    raise _DeadError(reason)


def _typed(kind: str, schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> Any:
    match kind:
        case "object":
            properties = schema.get("properties", {})
            return {name: _instance(properties.get(name, True), root, depth + 1) for name in schema.get("required", ())}
        case "array":
            prefix = schema.get("prefixItems", ())
            count = schema.get("minItems", 0)
            items = [prefix[i] if i < len(prefix) else schema.get("items", True) for i in range(count)]
            values = [_instance(item, root, depth + 1) for item in items]
            if schema.get("uniqueItems") and len(values) > 1:
                raise _DeadError("it requires several different items")
            return values
        case "string":
            return _string(schema)
        case "integer" | "number":
            return _number(schema, whole=kind == "integer")
        case "boolean":
            return False
        case "null":
            return None
    raise _DeadError(f"unknown type {kind!r}")


def _implied_type(schema: Mapping[str, Any]) -> str:
    if "properties" in schema or "required" in schema:
        return "object"
    if "items" in schema or "minItems" in schema:
        return "array"
    if "pattern" in schema or "minLength" in schema:
        return "string"
    if "minimum" in schema or "maximum" in schema:
        return "number"
    return "null"


def _string(schema: Mapping[str, Any]) -> str:
    shortest: int = schema.get("minLength", 0)
    pattern = schema.get("pattern")
    if "format" in schema and schema["format"] in _FORMATS:
        return _FORMATS[str(schema["format"])]
    if pattern is None:
        return "a" * shortest
    longest = schema.get("maxLength", math.inf)
    given = [text for text in (schema.get("default"), *schema.get("examples", ())) if isinstance(text, str)]
    for text in (*given, *_TRIALS, "a" * shortest):
        if shortest <= len(text) <= longest and re.search(pattern, text):
            return text
    raise _DeadError(f"a string of pattern {pattern!r}")


def _number(schema: Mapping[str, Any], *, whole: bool) -> int | float:
    least: float = schema.get("minimum", -math.inf)
    above: float = schema.get("exclusiveMinimum", -math.inf)
    most: float = schema.get("maximum", math.inf)
    below: float = schema.get("exclusiveMaximum", math.inf)
    step = schema.get("multipleOf", 1 if whole else None)

    def fits(value: float) -> bool:
        return least <= value <= most and above < value < below

    if fits(0):
        return 0
    # Zero is not allowed, so the range lies on one side of it: return its end nearer to zero.
    low, high = max(least, above), min(most, below)
    positive = low >= 0
    edge = low if positive else high
    if step is not None:
        start = math.ceil(edge / step) if positive else math.floor(edge / step)
        for value in (start * step, (start + (1 if positive else -1)) * step):
            if fits(value):
                return int(value) if float(value).is_integer() else value
        raise _DeadError("no number in the range")
    far = high if positive else low
    middle = (edge + far) / 2 if math.isfinite(far) else edge + (1 if positive else -1)
    for value in (edge, middle):
        if fits(value):
            return value
    raise _DeadError("no number in the range")


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    if not reference.startswith("#"):
        raise _DeadError(f"a reference outside the schema: {reference!r}")
    found: Any = root
    for step in reference[1:].split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, Mapping) or name not in found:
            raise _DeadError(f"a reference to nothing: {reference!r}")
        found = found[name]
    return found


def _merged(schemas: list[Any], root: Mapping[str, Any], depth: int) -> Mapping[str, Any]:
    """Merge schemas that must all hold: properties and required names of all, other keywords of the last."""
    if depth > _MAX_DEPTH:
        raise _DeadError("it refers to itself without end")
    filled = [schema for schema in schemas if schema is not True and schema != {}]
    merged: dict[str, Any] = {}
    for schema in filled:
        if not isinstance(schema, Mapping):
            raise _DeadError(f"not a schema: {schema!r}")
        if "$ref" in schema and len(filled) > 1:
            rest = {name: value for name, value in schema.items() if name != "$ref"}
            schema = _merged([_resolve(schema["$ref"], root), rest], root, depth + 1)
        for name, value in schema.items():
            if name == "properties":
                merged[name] = {**merged.get(name, {}), **value}
            elif name == "required":
                merged[name] = [*merged.get(name, ()), *(one for one in value if one not in merged.get(name, ()))]
            else:
                merged[name] = value
    return merged


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
    answers = [item for item in items if isinstance(item, str | Reply)]
    if len(answers) == len(items):
        return (Rule("", Script(tuple(answers))),)
    rules: list[Rule] = []
    for item in items:
        if isinstance(item, Rule | Script):
            rules.append(item if isinstance(item, Rule) else Rule("", item))
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
        self._positions: dict[tuple[int, str], int] = {}

    def reset(self) -> None:
        """Restart every script."""
        self._positions.clear()

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
            position = self._positions.get(key, 0)
            self._positions[key] = position + 1
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


@first_is(list)
@dataclass(frozen=True, slots=True)
class HostedEvals(Record):
    """The evals, runs, output items (by run id) and files (by file id) of one project, as the API returns them.

    The lists are read with every request, so a test can add, finish or delete runs while the server is running. A page
    holds at most `page_size` objects, whatever `limit` the client asks for.
    """

    evals: list[dict[str, Any]] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)
    items: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    page_size: int = 20

    def answer(self, path: str, query: Mapping[str, str]) -> ResourceWire | None:
        """What `GET path` returns; None if the path does not belong to this API."""
        match path.strip("/").split("/"):
            case ["v1", "evals"]:
                return self._page(self.evals, query)
            case ["v1", "evals", eval_id, "runs"]:
                if any(one["id"] == eval_id for one in self.evals):
                    return self._page([run for run in self.runs if run["eval_id"] == eval_id], query)
                return _not_found(f"eval {eval_id}")
            case ["v1", "evals", eval_id, "runs", run_id, "output_items"]:
                if any(run["id"] == run_id and run["eval_id"] == eval_id for run in self.runs):
                    return self._page(self.items.get(run_id, []), query)
                return _not_found(f"run {run_id}")
            case ["v1", "files", file_id, "content"]:
                content = self.files.get(file_id)
                return _not_found(f"file {file_id}") if content is None else ResourceWire(200, content.encode())
        return None

    def _page(self, objects: list[dict[str, Any]], query: Mapping[str, str]) -> ResourceWire:
        ordered = list(objects) if query.get("order", "asc") == "asc" else objects[::-1]
        start, after = 0, query.get("after")
        if after is not None:
            start = next((place for place, one in enumerate(ordered, 1) if one["id"] == after), -1)
            if start < 0:
                return ResourceWire(400, OpenAIWire().error(400, f"after: there is no object {after!r} in this list"))
        size = min(int(query.get("limit", "20")), self.page_size)
        data = ordered[start : start + size]
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
        return ResourceWire(200, {"object": "list", "data": data, "has_more": start + size < len(ordered), **ends})


class ResourceWire(OpenAIWire):
    """An answer that is computed before the request is admitted; limits and faults still apply to it.

    Fault rules see the path and the query as the last user message.
    """

    def __init__(self, status: int, body: dict[str, Any] | bytes) -> None:
        self.status = status
        self.body = body

    def parse(self, body: Mapping[str, Any], number: int) -> ParsedRequest:
        """The request in neutral form."""
        return ParsedRequest(number, self.name, "", (ParsedMessage("user", str(body["resource"]), {}),), body)

    def completion(self, request: ParsedRequest, reply: Reply, usage: Usage) -> Any:
        """The body of the answer, which some faults damage."""
        return self.body

    def events(self, request: ParsedRequest, reply: Reply, usage: Usage) -> list[bytes]:
        """Nothing is streamed."""
        return []


def _not_found(what: str) -> ResourceWire:
    return ResourceWire(404, OpenAIWire().error(404, f"there is no {what}"))
