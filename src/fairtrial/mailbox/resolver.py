"""From a reply address to a mailbox."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Protocol

from fairtrial.errors import ConfigurationError, ReplyNotAvailableError
from fairtrial.frozen import EMPTY
from fairtrial.mailbox.protocol import Mailbox, checked_name


class MailboxResolver(Protocol):
    """Knows which mailbox a name stands for."""

    def resolve(self, name: str) -> Mailbox[Any]:
        """The mailbox of that name.

        Raises:
            ReplyNotAvailableError: nobody knows it.
        """
        ...


class MailboxFactory(Protocol):
    """Makes the object for a mailbox that lives elsewhere; what it makes never creates the mailbox itself."""

    def create(self, name: str) -> Mailbox[Any]:
        """An object to send to the mailbox of that name with."""
        ...


class CompositeResolver:
    """Looks in a registry first, then asks a factory.

    Names come from the wire, so what the factory made is kept only for the `keep` names used last.

    Args:
        registry: Mailboxes known by name; a live mapping may grow later.
        factory: Makes the others; without one only the registry counts.
        keep: How many of the factory's mailboxes to remember.
    """

    def __init__(
        self, registry: Mapping[str, Mailbox[Any]] = EMPTY, factory: MailboxFactory | None = None, *, keep: int = 1024
    ) -> None:
        if keep < 1:
            raise ConfigurationError(f"keep is at least 1, not {keep}")
        self._registry = registry
        self._factory = factory
        self._keep = keep
        self._made: OrderedDict[str, Mailbox[Any]] = OrderedDict()

    def resolve(self, name: str) -> Mailbox[Any]:
        """The mailbox of that name.

        Raises:
            ReplyNotAvailableError: nobody knows it.
        """
        if (known := self._registry.get(name)) is not None:
            return known
        if (made := self._made.get(name)) is not None:
            self._made.move_to_end(name)
            return made
        if self._factory is None:
            raise ReplyNotAvailableError(f"nobody knows a mailbox called {name!r}")
        try:
            made = self._factory.create(checked_name(name))
        except ConfigurationError as error:
            raise ReplyNotAvailableError(str(error)) from None
        self._made[name] = made
        if len(self._made) > self._keep:
            self._made.popitem(last=False)
        return made
