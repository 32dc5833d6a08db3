"""The base class of everything that can be written in a script file."""

from __future__ import annotations

from typing import ClassVar

from pydantic import ConfigDict


class Record:
    """A base class that makes pydantic refuse unknown fields, so that a misspelt option in a script is an error."""

    __slots__ = ()
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
