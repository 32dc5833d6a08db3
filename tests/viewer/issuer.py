"""A provider of OpenID Connect on a free port of this machine, which can be told to behave wrongly."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, parse_qsl, unquote_plus, urlencode, urlsplit

from joserfc import jws
from joserfc.jwk import ECKey, Key, OKPKey, RSAKey
from joserfc.registry import HeaderParameter

CLIENT = "fairtrial"
SIGNATURES = ("RS256", "PS256", "ES256", "EdDSA")
type Claims = Mapping[str, Any]


def new_key(kid: str, algorithm: str = "RS256") -> Key:
    """A private key for an algorithm."""
    parameters: Any = {"kid": kid, "use": "sig"}
    if algorithm == "EdDSA":
        return OKPKey.generate_key("Ed25519", parameters)
    if algorithm.startswith("ES"):
        return ECKey.generate_key("P-256", parameters)
    return RSAKey.generate_key(2048, parameters)


kept_key = cache(new_key)
"""The same key for every test that does not change it: generating one takes up to a second."""


def encoded(value: bytes | Claims) -> str:
    """Base64 of bytes or of a JSON object, as a part of a token."""
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def signed(claims: Claims, key: Key, algorithm: str, **header: Any) -> str:
    """A signed token."""
    whole = {"alg": algorithm, "typ": "JWT", "kid": key.kid, **header}
    if isinstance(key, OKPKey):  # joserfc warns of the name that all issuers use.
        text = f"{encoded(whole)}.{encoded(claims)}"
        return f"{text}.{encoded(key.private_key.sign(text.encode()))}"  # type: ignore[union-attr]
    odd = {"x": HeaderParameter("A header of our own", "int")}
    known = jws.JWSRegistry(odd, [algorithm], strict_check_header=False)
    return jws.serialize_compact(whole, json.dumps(claims).encode(), key, registry=known)


def unsigned(claims: Claims, algorithm: str = "none") -> str:
    """A token that says that it needs no signature."""
    return f"{encoded({'alg': algorithm, 'typ': 'JWT'})}.{encoded(claims)}."


def signed_with_public_key(claims: Claims, key: Key, *, algorithm: str = "HS256", kid: bool = True) -> str:
    """A token with an HMAC whose secret is what everybody can read: the public key."""
    header = {"alg": algorithm, "typ": "JWT"} | ({"kid": key.kid} if kid else {})
    text = f"{encoded(header)}.{encoded(claims)}"
    assert isinstance(key, RSAKey)
    return f"{text}.{encoded(hmac.digest(key.as_pem(private=False), text.encode(), f'sha{algorithm[2:]}'))}"


@dataclass
class Behaviour:
    """Who signs in, and what the issuer does wrong.

    Attributes:
        person: What is true of the person who signs in.
        told_later: The claims that only UserInfo has.
        claims: Changes of the claims of tokens; None takes one away.
        userinfo: Changes of what UserInfo says.
        sent: Changes of what the browser brings back from the page to sign in.
        sign: Makes a token, instead of the issuer.
        algorithm: How tokens are signed.
        metadata: Changes of the document that discovery reads.
        status: The status of the answers, by path.
        seconds: How long an answer takes, by path.
        odd_keys: What is published before the keys, or instead of all.
    """

    person: dict[str, Any] = field(default_factory=lambda: {"sub": "u-1", "name": "Ann", "groups": []})
    told_later: frozenset[str] = frozenset()
    claims: dict[str, Any] = field(default_factory=dict)
    userinfo: dict[str, Any] = field(default_factory=dict)
    sent: dict[str, Any] = field(default_factory=dict)
    sign: Callable[[Claims], str] | None = None
    algorithm: str = "RS256"
    metadata: dict[str, Any] = field(default_factory=dict)
    status: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    odd_keys: Any = ()


class Issuer:
    """A running provider.

    Attributes:
        does: How it behaves; tests replace it.
        redirect_uri: The only address to which it sends browsers back.
        client_secret: What the client must know; empty for a public client.
        keys: The published keys, by algorithm.
        asked: Number of requests by path.
        given: Every code and token, none of which may be in a log.
    """

    def __init__(self, client_secret: str = "") -> None:
        self.does = Behaviour()
        self.redirect_uri = ""
        self.client_secret = client_secret
        self.keys: dict[str, Key] = {name: kept_key(f"{name}-1", name) for name in ("RS256", "ES256", "EdDSA")}
        self.keys["PS256"] = self.keys["RS256"]
        self.asked: Counter[str] = Counter()
        self.given: list[str] = []
        self._codes: dict[str, dict[str, str]] = {}
        self._people: dict[str, dict[str, Any]] = {}
        issuer = self

        class Handler(_Handler):
            provider = issuer

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(30)

    def rotate(self, *, withdraw: bool = True) -> Key:
        """Sign with a new key from now on; returns the old one, which stays published unless it is withdrawn."""
        old = self.keys["RS256"]
        self.keys["RS256"] = new_key(f"RS256-{secrets.token_hex(4)}")
        self.keys["PS256"] = self.keys["RS256"] if withdraw else old
        return old

    def token(self, person: Claims | None = None, *, audience: str = CLIENT, **more: Any) -> str:
        """A token about a person, as the issuer behaves at the moment."""
        now, does = time.time(), self.does
        about = {name: value for name, value in (person or does.person).items() if name not in does.told_later}
        fixed = {"iss": self.url, "aud": audience, "iat": int(now), "exp": int(now) + 300, "auth_time": int(now)}
        claims = _changed({**about, **fixed, **more}, does.claims)
        sign = does.sign or (lambda claims: signed(claims, self.keys[does.algorithm], does.algorithm))
        return self._note(sign(claims))

    def _note(self, secret: str) -> str:
        self.given.append(secret)
        return secret

    def _discovery(self) -> dict[str, Any]:
        parts = {"authorization_endpoint": "authorize", "token_endpoint": "token", "jwks_uri": "jwks",
                 "userinfo_endpoint": "userinfo"}  # fmt: skip
        made: dict[str, Any] = {"issuer": self.url, **{name: f"{self.url}/{path}" for name, path in parts.items()}}
        made |= {"response_types_supported": ["code"], "subject_types_supported": ["public"],
                 "id_token_signing_alg_values_supported": [*SIGNATURES, "HS256", "none"],
                 "code_challenge_methods_supported": ["S256"], "scopes_supported": ["openid", "profile", "email"],
                 "token_endpoint_auth_methods_supported": ["client_secret_basic", "none"],
                 "authorization_response_iss_parameter_supported": True}  # fmt: skip
        return _changed(made, self.does.metadata)

    def _authorize(self, asked: Mapping[str, str]) -> tuple[int, str]:
        """Sign the chosen person in, without a question."""
        wanted = {"response_type": "code", "client_id": CLIENT, "redirect_uri": self.redirect_uri,
                  "code_challenge_method": "S256", "scope": "openid profile email"}  # fmt: skip
        wrong = [name for name, value in wanted.items() if asked.get(name) != value]
        wrong += [name for name in ("state", "nonce", "code_challenge") if len(asked.get(name, "")) < 22]
        if wrong:
            return 400, f"wrong or missing: {', '.join(wrong)}"
        code = self._note(secrets.token_urlsafe(24))
        self._codes[code] = dict(asked)
        self._people[code] = dict(self.does.person)
        answer = _changed({"code": code, "state": asked["state"], "iss": self.url}, self.does.sent)
        return 303, f"{self.redirect_uri}?{urlencode(answer)}"

    def _exchange(self, form: Mapping[str, str], authorization: str) -> tuple[int, dict[str, Any]]:
        """Give tokens for a code, once, to the client that asked for it."""
        if not self._is_client(form, authorization):
            return 401, {"error": "invalid_client"}
        asked = self._codes.pop(form.get("code", ""), None)
        challenge = encoded(hashlib.sha256(form.get("code_verifier", "").encode()).digest())
        fits = asked is not None and (asked["code_challenge"], asked["redirect_uri"]) == (
            challenge, form.get("redirect_uri"),
        )  # fmt: skip
        if asked is None or not fits or form.get("grant_type") != "authorization_code":
            return 400, {"error": "invalid_grant", "error_description": "<script>alert(1)</script>"}
        person = self._people.pop(form["code"])
        access = self._note(secrets.token_urlsafe(24))
        self._people[access] = person
        return 200, {"access_token": access, "token_type": "Bearer", "expires_in": 300,
                     "id_token": self.token(person, nonce=asked["nonce"])}  # fmt: skip

    def _is_client(self, form: Mapping[str, str], authorization: str) -> bool:
        if not self.client_secret:
            return form.get("client_id") == CLIENT and not authorization
        name, _, secret = base64.b64decode(authorization.removeprefix("Basic ")).decode().partition(":")
        return (unquote_plus(name), unquote_plus(secret)) == (
            CLIENT,
            self.client_secret,
        ) and "client_secret" not in form

    def _userinfo(self, authorization: str) -> tuple[int, dict[str, Any]]:
        person = self._people.get(authorization.removeprefix("Bearer "))
        return (401, {}) if person is None else (200, _changed(person, self.does.userinfo))

    def respond(self, path: str, query: str, form: Mapping[str, str], authorization: str) -> tuple[int, Any]:
        """The status of the answer to a request, and its content."""
        self.asked[path] += 1
        time.sleep(self.does.seconds.get(path, 0.0))
        if path in self.does.status:
            return self.does.status[path], {"error": "server_error"}
        match path:
            case "/.well-known/openid-configuration":
                return 200, self._discovery()
            case "/jwks":
                published = {key.kid: key.as_dict(private=False) for key in self.keys.values()}
                odd = self.does.odd_keys
                return 200, {"keys": [*odd, *published.values()] if isinstance(odd, tuple) else odd}
            case "/authorize":
                return self._authorize({name: values[-1] for name, values in parse_qs(query).items()})
            case "/token":
                return self._exchange(form, authorization)
            case "/userinfo":
                return self._userinfo(authorization)
        return 404, {}


def _changed(values: Claims, changes: Claims) -> dict[str, Any]:
    return {name: value for name, value in {**values, **changes}.items() if value is not None}


class _Handler(BaseHTTPRequestHandler):
    provider: Issuer

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        self._answer(dict(parse_qsl(self.rfile.read(int(self.headers["Content-Length"])).decode())))

    def _answer(self, form: Mapping[str, str]) -> None:
        place = urlsplit(self.path)
        status, content = self.provider.respond(place.path, place.query, form, self.headers.get("Authorization") or "")
        body = b"" if status == 303 else json.dumps(content).encode()
        self.send_response(status)
        if status == 303:
            self.send_header("Location", content)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:100])  # In two packets, as from far away.
        time.sleep(0.005)
        self.wfile.write(body[100:])

    def log_message(self, format: str, *values: Any) -> None:
        """Print nothing."""
