"""Who makes a request: by a sign-in at an OpenID provider, or by what a proxy says."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote_plus, urlencode

from anyio import to_thread

from fairtrial.base.frozen import LruCache
from fairtrial.errors import FairtrialError, MissingExtraError
from fairtrial.runs.events import log
from fairtrial.viewer.access import cookies_of, digest_of
from fairtrial.viewer.team.config import (
    OidcSettings,
    ProxyHeaderSettings,
    ProxyTokenSettings,
    TeamSettings,
    check_address,
)
from fairtrial.viewer.team.database import Person, SignIn, TeamDatabase

_ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA", "Ed25519")
"""Signatures with a key that only the issuer has: never `none`, never a secret that we would share."""
_LEEWAY_SECONDS = 30.0
_KEYS_SECONDS = 3_600.0
_UNKNOWN_KEY_SECONDS = 10.0
_AGAIN_SECONDS = 60.0
_AWAY_SECONDS = 86_400.0
_ANSWER_SECONDS = 10.0
_MAX_ANSWER = 1_048_576
_MAX_ID = 255
_KEPT_TOKENS = 1_000
_MAX_COOKIES = 4  # Each is looked up.


class SignInRefusedError(FairtrialError):
    """Nobody is signed in; the message says why, without any secret."""


class Claims(NamedTuple):
    """What a verified token says of a person; `groups` is None if it does not say."""

    id: str
    name: str
    groups: tuple[str, ...] | None


class IssuerKeys:
    """The public keys of an issuer, read again when one is unknown."""

    def __init__(self, url: Callable[[], Any], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._url = url
        self._clock = clock
        self._keys: Any = None
        self._read_at = self._read_again_at = float("-inf")
        self._failed: tuple[float, str] = (float("-inf"), "")
        self._lock = asyncio.Lock()

    async def verify(self, token: str) -> dict[str, Any]:
        """Return the claims of a token with a signature of the issuer."""
        from joserfc import jwt
        from joserfc.errors import JoseError

        keys, failed, problem = await self._current(), None, ""
        while keys is not failed:
            try:
                return dict(jwt.decode(token, keys, algorithms=list(_ALGORITHMS)).claims)
            except (JoseError, ValueError, TypeError, KeyError) as error:
                failed, problem = keys, type(error).__name__
            keys = await self._current(failed)
        raise SignInRefusedError(f"the token has no valid signature of the issuer ({problem})")

    async def _current(self, failed: Any = None) -> Any:
        """Return the keys, read again if they are too old, or if they failed and were not read again just now.

        While they cannot be read, those that were read before are used for a day.
        """
        began = self._clock()
        async with self._lock:
            now = self._clock()
            age = now - self._read_at
            usable = age <= _AWAY_SECONDS
            if self._failed[0] > began and not usable:  # While we waited: asking once more would take as long.
                raise SignInRefusedError(self._failed[1])
            if failed is None and (age <= _KEYS_SECONDS or (usable and now - self._failed[0] < _AGAIN_SECONDS)):
                return self._keys
            if failed is not None:
                if self._keys is not failed or now - self._read_again_at < _UNKNOWN_KEY_SECONDS:
                    return self._keys
                self._read_again_at = now
            try:
                self._keys = _signature_keys(await fetch_json(await self._url()))
            except SignInRefusedError as error:
                self._failed = self._clock(), str(error)
                if not usable:
                    raise
                log.warning(
                    "the keys of the issuer cannot be read (%s); those that were read %d minutes ago are used",
                    error, age // 60,
                )  # fmt: skip
                return self._keys
            self._read_at = now
            return self._keys


def _signature_keys(found: dict[str, Any]) -> Any:
    """Return the keys for signatures. Those that are damaged, or of a kind that we do not know, are ignored."""
    from joserfc.errors import InvalidKeyTypeError
    from joserfc.jwk import JWKRegistry, KeySet

    published, usable = found.get("keys"), []
    if not isinstance(published, list):
        raise SignInRefusedError("the keys of the issuer cannot be read")
    for one in published:
        if isinstance(one, dict) and one.get("use") == "enc":
            continue
        try:
            if one["kty"] not in ("RSA", "EC", "OKP"):
                raise InvalidKeyTypeError
            key: Any = JWKRegistry.import_key(one)
            _ = key.public_key  # Read only now.
            usable.append(key)
        except Exception as error:  # A library's own errors for each kind of broken key.
            kid = one.get("kid") if isinstance(one, dict) else None
            log.warning("a key of the issuer is ignored: %.80r (%s)", kid, type(error).__name__)
    return KeySet(usable)


def check_claims(claims: Mapping[str, Any], *, issuer: str, audience: str, now: float, nonce: str | None = None) -> str:
    """Return the id of the person a token is about. Raises `SignInRefusedError`."""
    if claims.get("iss") != issuer:
        raise SignInRefusedError("the token is of another issuer")
    given = claims.get("aud")
    audiences = [given] if isinstance(given, str) else given
    if not isinstance(audiences, list) or audience not in audiences:
        raise SignInRefusedError("the token is for another audience")
    if (len(audiences) > 1 or "azp" in claims) and nonce is not None and claims.get("azp") != audience:
        raise SignInRefusedError("the token was given to another client")
    if _seconds(claims, "exp") <= now - _LEEWAY_SECONDS:
        raise SignInRefusedError("the token has expired")
    if _seconds(claims, "iat") > now + _LEEWAY_SECONDS:
        raise SignInRefusedError("the token is from the future: check the clock of this machine")
    if "nbf" in claims and _seconds(claims, "nbf") > now + _LEEWAY_SECONDS:
        raise SignInRefusedError("the token is not valid yet")
    if nonce is not None and claims.get("nonce") != nonce:
        raise SignInRefusedError("the token belongs to another sign-in")
    return check_id(claims.get("sub"))


def _seconds(claims: Mapping[str, Any], name: str) -> float:
    value = claims.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise SignInRefusedError(f"the token has no valid {name!r}")
    return float(value)


def check_id(value: Any) -> str:
    """Return the stable id of a person. Raises `SignInRefusedError` if it is none."""
    if not isinstance(value, str) or not value.strip() or len(value) > _MAX_ID or not value.isprintable():
        raise SignInRefusedError("no person is named")
    return value


def _name_in(claims: Mapping[str, Any], id: str) -> str:
    given = (claims.get(one) for one in ("name", "preferred_username", "email"))
    storable = (one.replace("\0", "").encode("utf-8", "replace").decode() for one in given if isinstance(one, str))
    return next(filter(str.strip, storable), id)[:_MAX_ID]


def groups_in(claims: Mapping[str, Any], claim: str) -> tuple[str, ...] | None:
    """Return the groups a token names; a claim may lie in others, as in `realm_access.roles`."""
    found: Any = claims.get(claim)
    if found is None and "." in claim:
        found = claims
        for part in claim.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
    if isinstance(found, str):
        return (found,)
    return tuple(one for one in found if isinstance(one, str)) if isinstance(found, list) else None


async def fetch_json(url: str, *, form: Mapping[str, str] | None = None, headers: Mapping[str, str] = {}) -> Any:
    """Return a JSON object from the issuer; with a form, what it answers to it."""
    try:
        import aiohttp
    except ImportError:
        raise MissingExtraError("fairtrial serve", "team") from None
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_ANSWER_SECONDS), trust_env=True) as client,
            client.request(
                "GET" if form is None else "POST", url, data=form, headers=headers, allow_redirects=False
            ) as answer,
        ):
            body = b""
            async for part in answer.content.iter_any():  # It may come in many parts.
                body += part
                if len(body) > _MAX_ANSWER:
                    raise SignInRefusedError("the provider's answer is too long")
            found = json.loads(body)
            if answer.status != 200 or not isinstance(found, dict):
                said = found.get("error") if isinstance(found, dict) else None
                raise SignInRefusedError(f"the provider answered {answer.status}{f': {said}' if said else ''}")
            return found
    except (aiohttp.ClientError, TimeoutError, ValueError, RecursionError) as error:
        raise SignInRefusedError(f"the provider cannot be asked: {type(error).__name__}") from None


class IdentitySource(Protocol):
    """How the people of requests are known."""

    async def person(self, headers: Sequence[tuple[str, str]]) -> Person | None:
        """Return who makes a request; None for nobody. Raises `SignInRefusedError`."""
        ...


@dataclass(frozen=True, slots=True)
class Redirection:
    """Where a browser is sent to sign in, and the secret that binds the sign-in to it."""

    address: str
    browser: str


class OidcIdentity:
    """Sessions on this server, which a sign-in at the provider opens."""

    def __init__(
        self, settings: TeamSettings, oidc: OidcSettings, database: TeamDatabase, clock: Callable[[], float] = time.time
    ) -> None:
        self._settings = oidc
        self._database = database
        self._clock = clock
        self._callback = f"{settings.origin}/callback"
        self._found: tuple[float, dict[str, Any]] | None = None
        self._keys = IssuerKeys(self._jwks_url)
        start = "__Host-" if settings.secure else ""
        self.cookie, self.browser_cookie = f"{start}fairtrial", f"{start}fairtrial-login"

    async def person(self, headers: Sequence[tuple[str, str]]) -> Person | None:
        """Return whose session one of the cookies is."""
        for secret in cookies_of(headers, self.cookie)[:_MAX_COOKIES]:
            if (found := await to_thread.run_sync(self._session, secret)) is not None:
                return found
        return None

    def _session(self, secret: str) -> Person | None:
        idle, absolute = 60 * self._settings.idle_minutes, 3_600 * self._settings.absolute_hours
        return self._database.session(secret, idle=idle, absolute=absolute)

    async def _provider(self) -> dict[str, Any]:
        """Return what the provider says of itself."""
        if self._found is None or time.monotonic() - self._found[0] > _KEYS_SECONDS:
            issuer = self._settings.issuer
            found = await fetch_json(f"{issuer.rstrip('/')}/.well-known/openid-configuration")
            if found.get("issuer") != issuer:
                raise SignInRefusedError(f"the provider at {issuer} calls itself {found.get('issuer')!r}")
            more = ("userinfo_endpoint",) if "userinfo_endpoint" in found else ()
            for name in ("authorization_endpoint", "token_endpoint", "jwks_uri", *more):
                try:
                    check_address(name, str(found.get(name)))
                except ValueError as error:
                    raise SignInRefusedError(f"the provider: {error}") from None
            self._found = time.monotonic(), found
        return self._found[1]

    async def _jwks_url(self) -> str:
        return str((await self._provider())["jwks_uri"])

    async def begin(self, headers: Sequence[tuple[str, str]], to: str) -> Redirection:
        """Return where to send a browser, so that it comes back to a page of ours."""
        provider = await self._provider()
        known = cookies_of(headers, self.browser_cookie)
        browser = known[0] if known and len(known[0]) >= 32 else secrets.token_urlsafe(32)
        started = await to_thread.run_sync(self._database.begin_sign_in, browser, to)
        challenge = base64.urlsafe_b64encode(hashlib.sha256(started.verifier.encode()).digest()).rstrip(b"=").decode()
        query = urlencode(
            {
                "response_type": "code", "client_id": self._settings.client_id, "redirect_uri": self._callback,
                "scope": " ".join(self._settings.scopes), "state": started.state, "nonce": started.nonce,
                "code_challenge": challenge, "code_challenge_method": "S256",
            }
        )  # fmt: skip
        endpoint = str(provider["authorization_endpoint"])
        return Redirection(f"{endpoint}{'&' if '?' in endpoint else '?'}{query}", browser)

    async def complete(
        self, headers: Sequence[tuple[str, str]], answer: Mapping[str, str]
    ) -> tuple[Claims, str, SignIn]:
        """Return who has signed in, the secret of the new session, and what was begun."""
        started: SignIn | None = None
        for browser in cookies_of(headers, self.browser_cookie)[:_MAX_COOKIES]:
            if started is None:
                started = await to_thread.run_sync(self._database.end_sign_in, answer.get("state", ""), browser)
        if started is None:
            raise SignInRefusedError("this sign-in did not begin in this browser, has been used, or took too long")
        announced = (await self._provider()).get("authorization_response_iss_parameter_supported") is True
        if ("iss" in answer or announced) and answer.get("iss") != self._settings.issuer:
            raise SignInRefusedError("the answer is of another issuer")
        if "error" in answer or not answer.get("code"):
            raise SignInRefusedError(f"the provider refused: {answer.get('error', 'it sent no code')[:80]}")
        tokens = await self._tokens(answer["code"], started.verifier)
        claims = await self._claims(tokens, started.nonce)
        await to_thread.run_sync(self._database.meet, claims.id, claims.name)
        session = await to_thread.run_sync(self._database.open_session, claims.id, claims.groups or ())
        return claims, session, started

    async def _tokens(self, code: str, verifier: str) -> dict[str, Any]:
        form = {
            "grant_type": "authorization_code", "code": code, "redirect_uri": self._callback,
            "client_id": self._settings.client_id, "code_verifier": verifier,
        }  # fmt: skip
        headers = {"accept": "application/json"}
        if secret := self._settings.client_secret:
            pair = f"{quote_plus(self._settings.client_id)}:{quote_plus(secret)}"
            headers["authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
        found: dict[str, Any] = await fetch_json(
            str((await self._provider())["token_endpoint"]), form=form, headers=headers
        )
        return found

    async def _claims(self, tokens: Mapping[str, Any], nonce: str) -> Claims:
        token = tokens.get("id_token")
        if not isinstance(token, str):
            raise SignInRefusedError("the provider sent no ID token")
        found, asked = await self._keys.verify(token), self._settings
        id = check_claims(found, issuer=asked.issuer, audience=asked.client_id, now=self._clock(), nonce=nonce)
        groups = groups_in(found, asked.groups_claim)
        endpoint, access = (await self._provider()).get("userinfo_endpoint"), tokens.get("access_token")
        if groups is None and isinstance(endpoint, str) and isinstance(access, str):
            more = await fetch_json(endpoint, headers={"authorization": f"Bearer {access}"})
            if more.get("sub") != id:
                raise SignInRefusedError("the provider's facts are of another person")
            groups, found = groups_in(more, asked.groups_claim), {**more, **found}
        return Claims(id, _name_in(found, id), groups)


def _only(headers: Sequence[tuple[str, str]], name: str) -> str | None:
    """Return the value of a header, in UTF-8; two of them are one too many."""
    found = [value for known, value in headers if known == name.lower()]
    if len(found) > 1:
        raise SignInRefusedError(f"the request has several headers {name}")
    try:
        return "".join(found).encode("latin-1").decode("utf-8").strip() or None
    except UnicodeDecodeError:
        raise SignInRefusedError(f"the header {name} is not in UTF-8") from None


class ProxyTokenIdentity:
    """A token that a proxy has signed, in each request."""

    def __init__(
        self, settings: ProxyTokenSettings, database: TeamDatabase, clock: Callable[[], float] = time.time
    ) -> None:
        self._settings = settings
        self._database = database
        self._clock = clock
        self._keys = IssuerKeys(self._jwks_url)
        self._verified: LruCache[str, tuple[float, Person]] = LruCache(_KEPT_TOKENS)

    async def _jwks_url(self) -> str:
        return self._settings.jwks_url

    async def person(self, headers: Sequence[tuple[str, str]]) -> Person | None:
        """Return whom the token names."""
        if (token := _only(headers, self._settings.header)) is None:
            return None
        token = token.removeprefix("Bearer ")
        known = self._verified.get(digest_of(token))
        if known is not None and self._clock() < known[0]:
            return known[1]
        claims, asked, now = await self._keys.verify(token), self._settings, self._clock()
        id = check_claims(claims, issuer=asked.issuer, audience=asked.audience, now=now)
        name, groups = _name_in(claims, id), groups_in(claims, asked.groups_claim) or ()
        found = Person(id, name, groups, await to_thread.run_sync(self._database.meet, id, name))
        self._verified.put(digest_of(token), (min(_seconds(claims, "exp"), now + 60.0), found))
        return found


class ProxyHeaderIdentity:
    """A header that a proxy has set: only it can reach the Unix socket."""

    def __init__(self, settings: ProxyHeaderSettings, database: TeamDatabase) -> None:
        self._settings = settings
        self._database = database
        self._known: LruCache[str, str] = LruCache(_KEPT_TOKENS)

    async def person(self, headers: Sequence[tuple[str, str]]) -> Person | None:
        """Return whom the header names."""
        if (given := _only(headers, self._settings.header)) is None:
            return None
        id = check_id(given)
        groups = tuple(filter(None, map(str.strip, (_only(headers, self._settings.groups_header) or "").split(","))))
        if (secret := self._known.get(id)) is None:
            secret = await to_thread.run_sync(self._database.meet, id, id)
            self._known.put(id, secret)
        return Person(id, id, groups, secret)


def open_identity(settings: TeamSettings, database: TeamDatabase) -> IdentitySource:
    """Return the identity that is configured."""
    match settings.identity:
        case OidcSettings() as oidc:
            return OidcIdentity(settings, oidc, database)
        case ProxyTokenSettings() as token:
            return ProxyTokenIdentity(token, database)
        case ProxyHeaderSettings() as header:
            return ProxyHeaderIdentity(header, database)
