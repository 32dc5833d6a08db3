"""Resolves reply addresses to mailboxes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from fairtrial.base.frozen import EMPTY
from fairtrial.base.lru import LruCache
from fairtrial.errors import ConfigurationError, ReplyNotAvailableError
from fairtrial.mailbox.protocol import Mailbox, validate_name


class MailboxResolver(Protocol):
    """Resolves names to mailboxes."""

    def resolve(self, name: str) -> Mailbox[Any]:
        """The mailbox of that name.

        Raises:
            ReplyNotAvailableError: nobody knows it.
        """
        ...


class MailboxFactory(Protocol):
    """Creates client objects for remote mailboxes; they never create the mailbox itself."""

    def create(self, name: str) -> Mailbox[Any]:
        """Return an object for sending to the mailbox with this name."""
        ...


class CompositeResolver:
    """Looks in a registry first, then calls a factory.

    Names come from messages, so only the `keep` most recently used mailboxes of the factory are cached.

    Args:
        registry: Mailboxes by name; the mapping may change later.
        factory: Creates the others; without one, only the registry is used.
        keep: Number of the factory's mailboxes to cache.
    """

    def __init__(
        self, registry: Mapping[str, Mailbox[Any]] = EMPTY, factory: MailboxFactory | None = None, *, keep: int = 1024
    ) -> None:
        if keep < 1:
            raise ConfigurationError(f"keep must be at least 1 (got {keep})")
        self._registry = registry
        self._factory = factory
        self._made: LruCache[str, Mailbox[Any]] = LruCache(keep)

    def resolve(self, name: str) -> Mailbox[Any]:
        """The mailbox of that name.

        Raises:
            ReplyNotAvailableError: nobody knows it.
        """
        if (known := self._registry.get(name)) is not None:
            return known
        if (made := self._made.get(name)) is not None:
            return made
        if self._factory is None:
            raise ReplyNotAvailableError(f"there is no mailbox named {name!r}")
        try:
            made = self._factory.create(validate_name(name))
        except ConfigurationError as error:
            raise ReplyNotAvailableError(str(error)) from None
        self._made.put(name, made)
        return made
