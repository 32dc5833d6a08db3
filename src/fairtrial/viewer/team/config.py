"""The file that `fairtrial serve` reads."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from fairtrial.errors import ConfigurationError
from fairtrial.viewer.access import LOOPBACK, PERMISSIONS_OF, Permission, Role, without_port

_PROJECT = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")
_EVERYBODY = "*"


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


type Groups = Annotated[tuple[str, ...], BeforeValidator(_listed)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class OidcSettings(_Section):
    """People sign in at an OpenID provider, by the authorization code flow."""

    kind: Literal["oidc"]
    issuer: str
    client_id: str
    client_secret_env: str | None = None
    scopes: tuple[str, ...] = ("openid", "profile", "email")
    groups_claim: str = "groups"
    idle_minutes: float = Field(480, gt=0)
    absolute_hours: float = Field(24, gt=0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_address("issuer", self.issuer)
        if self.client_secret_env and not os.environ.get(self.client_secret_env):
            raise ValueError(f"the environment has no {self.client_secret_env}, which client_secret_env names")
        return self

    @property
    def client_secret(self) -> str:
        """The secret of the client; empty for one that has none."""
        return os.environ[self.client_secret_env] if self.client_secret_env else ""


class ProxyTokenSettings(_Section):
    """A proxy signs in people, and adds a signed token to each request."""

    kind: Literal["proxy-jwt"]
    header: str
    issuer: str
    audience: str
    jwks_url: str
    groups_claim: str = "groups"

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_address("jwks_url", self.jwks_url)
        return self


class ProxyHeaderSettings(_Section):
    """A proxy signs in people, and names them in a header: believed over a Unix socket only."""

    kind: Literal["proxy-header"]
    header: str = "x-forwarded-user"
    groups_header: str = "x-forwarded-groups"


class ProjectSettings(_Section):
    """A store, and the groups that have a role in it."""

    store: str
    title: str = ""
    viewer: Groups = ()
    reviewer: Groups = ()
    editor: Groups = ()
    admin: Groups = ()
    keep_days: float | None = Field(None, gt=0)

    def permissions(self, groups: Iterable[str]) -> frozenset[Permission]:
        """Return what a person in these groups may do."""
        given = {*groups, _EVERYBODY}
        roles: dict[Role, tuple[str, ...]] = {
            "viewer": self.viewer, "reviewer": self.reviewer, "editor": self.editor, "admin": self.admin,
        }  # fmt: skip
        return frozenset(
            permission
            for role, allowed in roles.items()
            if not given.isdisjoint(allowed)
            for permission in PERMISSIONS_OF[role]
        )


class TeamSettings(_Section):
    """The whole file. Paths in it are relative to its folder."""

    url: str
    listen: str = "127.0.0.1:7879"
    database: str = "sqlite:///team.db"
    identity: Annotated[OidcSettings | ProxyTokenSettings | ProxyHeaderSettings, Field(discriminator="kind")]
    projects: dict[str, ProjectSettings] = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_address("url", self.url)
        if urlsplit(self.url).path.strip("/") or urlsplit(self.url).query:
            raise ValueError("url must be a host of its own, without a path")
        for name in self.projects:
            if _PROJECT.fullmatch(name) is None:
                raise ValueError(f"a project needs a name of lower-case letters, digits, - and _ (got {name!r})")
        if isinstance(self.identity, ProxyHeaderSettings) and self.socket_path is None:
            raise ValueError(
                'a header alone proves nothing over TCP: with kind = "proxy-header", listen must be "unix:FILE"'
            )
        return self

    @property
    def socket_path(self) -> Path | None:
        """The Unix socket to listen on; None for a port."""
        return Path(self.listen.removeprefix("unix:")) if self.listen.startswith("unix:") else None

    @property
    def secure(self) -> bool:
        """Whether people reach the server over TLS."""
        return self.url.startswith("https://")

    @property
    def host(self) -> str:
        """The host as browsers name it: without the port that its scheme means."""
        parts = urlsplit(self.url)
        usual = {"https": ":443", "http": ":80"}[parts.scheme]
        return parts.netloc.lower().removesuffix(usual)

    @property
    def origin(self) -> str:
        """The address without a slash at its end."""
        return f"{urlsplit(self.url).scheme}://{self.host}"


def check_address(name: str, text: str) -> None:
    """Raise `ValueError` unless an address is https, or http on this machine."""
    parts = urlsplit(text)
    local = without_port(parts.netloc) in LOOPBACK
    if not parts.netloc or "@" in parts.netloc or parts.scheme not in (("https", "http") if local else ("https",)):
        raise ValueError(f"{name} must be an https address, or http on this machine (got {text!r})")


def read_settings(file: Path) -> TeamSettings:
    """Read the file. Raises `ConfigurationError` that names what is wrong in it."""
    try:
        given = tomllib.loads(file.read_text(encoding="utf-8"))
        found = TeamSettings.model_validate(given)
    except OSError as error:
        raise ConfigurationError(f"cannot read {file}: {error.strerror}") from None
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, one['loc'])) or 'the file'}: {_plain(one['msg'])}" for one in error.errors()]
        raise ConfigurationError(f"{file}: " + "; ".join(problems)) from None
    except ValueError as error:  # No TOML, or no UTF-8.
        raise ConfigurationError(f"{file} is no TOML: {error}") from None
    folder = file.absolute().parent
    projects = {
        name: one.model_copy(update={"store": _beside(folder, one.store)}) for name, one in found.projects.items()
    }
    listen = found.listen if found.socket_path is None else f"unix:{folder / found.socket_path}"
    return found.model_copy(
        update={"projects": projects, "database": _beside(folder, found.database), "listen": listen}
    )


def _plain(message: str) -> str:
    return message.removeprefix("Value error, ").replace("Extra inputs are not permitted", "there is no such setting")


def _beside(folder: Path, address: str) -> str:
    """Return the address of a database; a relative file is one in this folder."""
    if address.startswith("memory:") or ("://" in address and not address.startswith("sqlite:///")):
        return address
    return f"sqlite:///{folder / address.removeprefix('sqlite:///')}"
