from __future__ import annotations

import io
import json
import logging
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairtrial import ChatMessage, Metric, Sample, Score, Session
from fairtrial.store import Label, RedactingFilter, Redactor, RunStore, redact, register_secret
from fairtrial.store.compress import decompress
from fairtrial.trials.keys import TrialKey
from tests.store.build import result, run_record

SECRET = "sk-live-0123456789abcdef"
AWKWARD = 'pass"word\\with/é slash'
NUMBER = "9876543210123"


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redact, "_registered", set())


class TestRedactor:
    def test_a_secret_is_replaced_wherever_it_stands(self) -> None:
        redactor = Redactor([SECRET])
        assert redactor.text(f"a {SECRET}{SECRET} b") == "a [redacted][redacted] b"
        assert redactor.data(f"\xff {SECRET}".encode("latin-1")) == b"\xff [redacted]"
        assert redactor.json(json.dumps({"k": [SECRET]})) == '{"k":["[redacted]"]}'

    def test_what_holds_no_secret_is_left_alone(self) -> None:
        for redactor in (Redactor(), Redactor([SECRET])):
            assert redactor.text("nothing here") == "nothing here"
            assert redactor.json('{"a": 1}') == '{"a": 1}'
            assert redactor.data(b"\xff\x00") == b"\xff\x00"
            assert redactor.text("see https://example.com/a:b@c") == "see https://example.com/a:b@c"

    @pytest.mark.parametrize("ensure_ascii", [True, False])
    @pytest.mark.parametrize("depth", [1, 2, 3])
    def test_a_secret_is_found_inside_json_however_deep_it_is_quoted(self, depth: int, ensure_ascii: bool) -> None:
        text: Any = AWKWARD
        for _ in range(depth):
            text = json.dumps({"password": text}, ensure_ascii=ensure_ascii)
        redactor = Redactor([AWKWARD])
        for found in (redactor.text(text), redactor.json(text), redactor.data(text.encode()).decode()):
            assert "word" not in found.replace("password", "")
            assert "[redacted]" in found
        assert json.loads(redactor.json(text)) is not None

    def test_a_slash_may_be_escaped(self) -> None:
        assert Redactor(["abc/defghij"]).text('{"k":"abc\\/defghij"}') == '{"k":"[redacted]"}'

    def test_a_secret_that_is_a_number_leaves_json_behind(self) -> None:
        text = '{"id":9876543210123,"n":[1.5,true,null,98765432101234],"s":"9876543210123"}'
        found = Redactor([NUMBER]).json(text)
        assert json.loads(found) == {"id": "[redacted]", "n": [1.5, True, None, "[redacted]"], "s": "[redacted]"}

    def test_a_secret_that_reaches_beyond_one_string_takes_the_whole(self) -> None:
        assert Redactor(['"user","pw"']).json('["user","pw"]') == '"[redacted]"'

    def test_text_that_only_claims_to_be_json_is_still_redacted(self) -> None:
        assert Redactor([SECRET]).json("{" + SECRET) == "{[redacted]"

    def test_the_longer_of_two_secrets_goes_first(self) -> None:
        assert Redactor(["abcdefgh", "abcdefghij"]).text("abcdefghij abcdefgh") == "[redacted] [redacted]"

    def test_a_password_in_a_url_is_a_secret_without_being_known(self) -> None:
        redactor = Redactor()
        text = 'use postgresql://bob:hunter2@db/x and redis://:pw@h, not "http://a/b:c@d"'
        found = 'use postgresql://bob:[redacted]@db/x and redis://:[redacted]@h, not "http://a/b:c@d"'
        assert redactor.text(text) == found
        assert redactor.data(b"\xff" + text.encode()) == b"\xff" + found.encode()
        assert json.loads(redactor.json(json.dumps([text]))) == [found]
        assert redactor.data(json.dumps([text]).encode()) == json.dumps([found], separators=(",", ":")).encode()

    def test_the_environment_is_searched_by_name(self) -> None:
        environ = {
            "OPENAI_API_KEY": "key-value-1",
            "github_token": "token-value-2",
            "MY_SECRET_THING": "secret-value-3",
            "DB_PASSWORD": "password-value-4",
            "EDITOR": "innocent-value",
            "SHORT_KEY": "short",
            "DATABASE_URL": "postgresql://u:url%20password@h/d",
        }
        redactor = Redactor.of_environment(environ)
        for name in ("OPENAI_API_KEY", "github_token", "MY_SECRET_THING", "DB_PASSWORD"):
            assert redactor.text(environ[name]) == "[redacted]"
        assert redactor.text("innocent-value short") == "innocent-value short"
        assert redactor.text("url%20password url password") == "[redacted] [redacted]"

    def test_registered_secrets_count_from_then_on(self) -> None:
        assert redact.current().text(SECRET) == SECRET
        register_secret(SECRET)
        register_secret("test")
        assert redact.current().text(f"{SECRET} test") == "[redacted] test"
        assert redact.current() is redact.current()
        assert Redactor.of_environment({}).text(SECRET) == "[redacted]"

    @given(
        secret=st.text(st.characters(codec="utf-8"), min_size=8, max_size=20),
        before=st.text(max_size=10),
        depth=st.integers(0, 2),
    )
    def test_no_secret_survives_in_json(self, secret: str, before: str, depth: int) -> None:
        tree: Any = [before + secret, {secret: before}]
        for _ in range(depth):
            tree = json.dumps(tree)
        redactor = Redactor([secret])
        found = redactor.json(json.dumps(tree))
        assert redactor.text(found) == found
        assert secret not in json.dumps(json.loads(found)) or secret in "[redacted]"


class TestLogging:
    @pytest.fixture
    def logged(self) -> Iterator[Callable[[], str]]:
        stream = io.StringIO()
        handler = logging.StreamHandler(stream)
        handler.addFilter(RedactingFilter())
        logger = logging.getLogger("fairtrial.test-redact")
        logger.propagate = False
        logger.addHandler(handler)
        yield stream.getvalue
        logger.removeHandler(handler)

    def test_messages_arguments_and_tracebacks_are_redacted(self, logged: Callable[[], str]) -> None:
        register_secret(SECRET)
        logger = logging.getLogger("fairtrial.test-redact")
        logger.warning("plain %s", "words")
        logger.warning("key %s and %d", SECRET, 5)
        try:
            raise ValueError(f"refused {SECRET}")
        except ValueError:
            logger.exception("failed", stack_info=True)
        text = logged()
        assert SECRET not in text
        assert "plain words" in text
        assert "key [redacted] and 5" in text
        assert "ValueError: refused [redacted]" in text


def plant(store: RunStore, secret: str) -> None:
    """Put a secret everywhere a run can carry text."""
    nested = json.dumps({"said": secret})
    run = store.create_run(
        run_record(tags={"tag": secret}, config={"key": secret}, params={"terse": {"k": nested}}, notes={"n": [secret]})
    )
    store.update_run("r1", notes={"more": {"x": secret}})
    session = Session(tags={"t": secret})
    session.record(ChatMessage("user", f"{nested} " * 20))
    session.record(ChatMessage("assistant", secret))
    batch = [
        result(
            run,
            0,
            output={"text": f"before {secret} after", secret: nested},
            score=Score(
                1.0,
                reason=f"because {secret}",
                metrics=[
                    Metric(f"m {secret}", 1.0, 1.0, {"why": secret}),
                    Metric("m [redacted]", 0.5),
                ],
                name=secret,
            ),
            metadata={"k": secret, "nested": nested},
            snapshot=session.snapshot(),
        ),
        result(run, 1, "task_error", error=f"ValueError: {nested} {secret}"),
        result(run, 4, output=secret, snapshot=f"no JSON {secret}".encode()),
    ]
    given: dict[int, Sample[Any, Any]] = {
        0: Sample("s0", secret, {"e": nested}, {"m": secret, secret: 1}),
        1: Sample("s1", [secret], secret),
        2: Sample(f"id {secret}", 1),
    }
    named = result(run, 8)
    batch.append(replace(named, key=TrialKey("r1", "baseline", f"id {secret}", 0)))
    committed = store.commit("r1", batch, given)
    assert committed == (4, 0, (), ())
    store.label(Label(TrialKey("r1", "baseline", f"id {secret}"), f"name {secret}", {"v": secret}, secret))
    store.put_blob(nested.encode() * 50)
    store.put_blob(b"\xff" + secret.encode())


def scan(column: Any) -> str:
    """A stored value as text that can be searched, decompressed if need be."""
    data = decompress(bytes(column)) if isinstance(column, bytes | memoryview) else str(column).encode()
    text = data.decode("utf-8", "replace")
    return text + text.replace("\\", "")


def everything_read(store: RunStore) -> str:
    parts: list[Any] = [store.runs(), list(store.labels("r1")), store.totals("r1"), store.metric_means("r1")]
    parts += [(found, found.output, found.snapshot, found.sample) for found in store.results("r1", snapshots=True)]
    return repr(parts)


SECRETS = pytest.mark.parametrize("secret", [SECRET, 'aw"kward\\secret', NUMBER])


class TestStores:
    @SECRETS
    def test_a_secret_never_comes_back_from_a_store(
        self, store: RunStore, secret: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SERVICE_API_KEY", secret)  # Set after the store was opened.
        plant(store, secret)
        text = everything_read(store)
        assert secret not in text
        assert secret.replace("\\", "\\\\") not in text
        assert text.count("[redacted]") > 15
        # What is not secret is still there, and a redacted sample can be found by its id.
        [first] = store.results("r1", sample_ids=["s0"], outcomes=["scored"])
        assert first.score is not None
        assert first.score.reason == "because [redacted]"
        assert [metric.value for metric in first.score.metrics] == [1.0, 0.5]
        assert len(list(store.results("r1", sample_ids=[f"id {secret}"]))) == 1
        assert len(list(store.labels("r1", name=f"name {secret}"))) == 1

    @SECRETS
    def test_a_secret_is_in_no_byte_of_an_sqlite_store(
        self, tmp_path: Path, opened: Callable[[str], RunStore], secret: str
    ) -> None:
        register_secret(secret)
        path = tmp_path / "runs.db"
        plant(opened(str(path)), secret)
        forms = [secret, json.dumps(secret)[1:-1], json.dumps(json.dumps(secret))[1:-1]]
        for file in tmp_path.iterdir():
            assert not [form for form in forms if form.encode() in file.read_bytes()], file.name
        connection = sqlite3.connect(path)
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        columns = [
            scan(column) for table in tables for row in connection.execute(f"SELECT * FROM {table}") for column in row
        ]
        connection.close()
        assert sum("[redacted]" in text for text in columns) > 15
        assert not [text for text in columns if secret in text or secret.replace("\\", "") in text]

    @SECRETS
    def test_a_secret_is_in_no_column_of_a_postgresql_store(
        self, pg_url: str, opened: Callable[[str], RunStore], secret: str
    ) -> None:
        register_secret(secret)
        plant(opened(pg_url), secret)
        with psycopg.connect(pg_url) as connection:
            tables = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall()
            columns = [
                scan(column)
                for (table,) in tables
                for row in connection.execute(f"SELECT * FROM {table}".encode()).fetchall()
                for column in row
            ]
        assert sum("[redacted]" in text for text in columns) > 15
        assert not [text for text in columns if secret in text or secret.replace("\\", "") in text]

    def test_the_password_of_a_postgresql_store_is_a_secret(
        self, pg_url: str, opened: Callable[[str], RunStore]
    ) -> None:
        store = opened(pg_url)
        run = store.create_run(run_record(config={"store": pg_url}))
        store.commit("r1", [result(run, 0, "task_error", error="login store-test-password failed")])
        assert "store-test-password" not in everything_read_runs(store)


def everything_read_runs(store: RunStore) -> str:
    return repr([store.runs(), list(store.results("r1"))])
