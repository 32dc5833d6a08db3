"""Decode pydantic models and types with constraints."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

from fairtrial.base.codec.escape import restore
from fairtrial.base.codec.scalars import Decoder
from fairtrial.errors import CodecError


def is_pydantic(base: type) -> bool:
    """True for models, pydantic dataclasses and types that bring a pydantic schema."""
    # Looked up by attribute: importing pydantic for people who do not use its models would cost them its start-up.
    return (
        hasattr(base, "__pydantic_core_schema__")
        or hasattr(base, "__get_pydantic_core_schema__")
        or base.__module__ == "ipaddress"
    )


def model(kind: Any) -> Decoder:
    """Read a model by its own rules."""
    adapter = _adapter(kind)
    strict = bool(getattr(kind, "model_config", {}).get("strict"))

    def decode_model(value: Any) -> Any:
        tree = restore(value)
        if strict:  # A strict model takes dates and the like as text, but only from JSON, which has no bytes.
            try:
                text = json.dumps(tree, ensure_ascii=False).encode("utf-8")
            except (TypeError, UnicodeEncodeError):
                pass
            else:
                return _validated(lambda: adapter().validate_json(text, by_alias=True, by_name=True))
        return _validated(lambda: adapter().validate_python(tree, strict=False, by_alias=True, by_name=True))

    return decode_model


def constrained(kind: Any, inner: Decoder) -> Decoder:
    """Read a value, then let pydantic check what `Annotated` says about it."""
    adapter = _adapter(kind)

    def decode_constrained(value: Any) -> Any:
        decoded = inner(value)
        return _validated(lambda: adapter().validate_python(decoded))

    return decode_constrained


def _adapter(kind: Any) -> Callable[[], Any]:
    @functools.cache
    def make() -> Any:
        from pydantic import TypeAdapter
        from pydantic.errors import PydanticUserError

        try:
            return TypeAdapter(kind)
        except PydanticUserError as error:
            raise CodecError(f"pydantic cannot check {kind}: {error.message}") from None

    return make


def _validated(validate: Callable[[], Any]) -> Any:
    from pydantic import ValidationError

    try:
        return validate()
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise CodecError(first["msg"], tuple(first["loc"])) from None
