from __future__ import annotations

import base64
import io
import json
import logging
import re
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairtrial import ChatMessage, Label, Metric, Sample, Score, Session, TrialKey, open_store
from fairtrial.base.codec import dumps
from fairtrial.errors import SecretInDataError
from fairtrial.store import RedactingFilter, Redactor, RunRecord, RunStore, redact, register_secret
from fairtrial.store.compress import decompress
from fairtrial.store.credential_formats import FORMATS
from fairtrial.store.redact import REDACTED
from fairtrial.store.rows import DETAIL_COLUMNS, RESULT_COLUMNS, Encoder
from tests.store.build import result, run_record

SECRET = "sk-live-0123456789abcdef"
AWKWARD = 'pass"word\\with/é slash'
NUMBER = "9876543210123"


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redact, "_registered", {})


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
            "MY_SECRET": "secret-value-3",
            "DB_PASSWORD": "password-value-4",
            "EDITOR": "innocent-value",
            "SHORT_KEY": "short",
            "DATABASE_URL": "postgresql://u:url%20password@h/d",
        }
        redactor = Redactor(redact.environment_secrets(environ))
        for name in ("OPENAI_API_KEY", "github_token", "MY_SECRET", "DB_PASSWORD"):
            assert redactor.text(environ[name]) == "[redacted]"
        assert redactor.text("innocent-value short") == "innocent-value short"
        assert redactor.text("url%20password url password") == "[redacted] [redacted]"

    def test_registered_secrets_count_from_then_on(self) -> None:
        assert redact.current().text(AWKWARD) == AWKWARD
        register_secret(AWKWARD)
        register_secret("test")
        assert redact.current().text(f"{AWKWARD} test") == "[redacted] test"
        assert redact.current() is redact.current()

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


KEY = "q7Rt9xLm2WpZ4vBn"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OPENAI_API_KEY", KEY),
        ("AWS_SECRET_ACCESS_KEY", "/" + "wJalrXUtnFEMI7K7MDENGbPxRfiCYEXAMPLEKEYx"),
        ("GITHUBTOKEN", KEY),
        ("API_KEY_2", KEY),
        ("API_KEY_PROD", KEY),
        ("DB_PASS", "hunter2hunter2"),
        ("DB_PWD", "letmeinletmein"),
        ("PGPASSWORD", "correct-horse"),
        ("PASSPHRASE", "correct horse battery"),
        ("GITHUB_PAT", KEY),
        ("GOOGLE_CREDENTIALS", '{"private_key": "' + KEY + '"}'),
        ("SESSION_COOKIE", "sid=0123456789abcdef"),
        ("ALERT_WEBHOOK", "https://hooks.example/T000/B000/XXXXXXXX"),
        ("SERVICE_KEY", "987654321012"),
        ("RANDOM_LETTERS_KEY", "GzQwKpTnVbXsLmRjYcDf"),
    ],
)
def test_a_variable_that_holds_a_credential_is_a_secret(name: str, value: str) -> None:
    assert redact.environment_secrets({name: value}) == {value: f"the value of ${name}"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TOKENIZER_NAME", "bert-base-uncased"),
        ("AWS_SECRET_NAME", "customer-support"),
        ("KEY_ACCOUNT", "customer-support"),
        ("CACHE_KEY_PREFIX", "evaluation"),
        ("PASSWORD_STORE_DIR", "/home/me/passwords-2"),
        ("MONKEY", "abc123def456"),
        ("SSH_KEY", "/home/me/.ssh/id_rsa2"),
        ("TLS_KEY", "~/certs/server1.pem"),
        ("TLS_KEY", "./certs/server1.pem"),
        ("TLS_KEY", "C:\\certs\\server1.pem"),
        ("PWD", "some-folder-2"),
        ("OLDPWD", "some-folder-2"),
        ("PRIMARY_KEY", "customer_id_2"),
        ("EOS_TOKEN", "<|endoftext|>"),
        ("STRIPE_PUBLISHABLE_KEY", KEY),
        ("API_KEY", "not-needed"),
        ("API_KEY", "placeholder"),
        ("BUILD_KEY", "20261115"),
        ("POSTGRES_PASSWORD", "postgres"),
        ("SHORT_KEY", "abc1234"),
        ("DATABASE_URL", "postgresql://postgres:postgres@db/app"),
        ("MAX_TOKENS", "100000000000"),
        ("FAIRTRIAL_NOT_SECRET", "API_KEY_1,API_KEY_2"),
    ],
)
def test_a_variable_that_holds_no_credential_is_not_a_secret(name: str, value: str) -> None:
    assert redact.environment_secrets({name: value}) == {}


def test_variables_can_be_named_as_secret_and_as_not_secret() -> None:
    environ = {
        "FAIRTRIAL_SECRETS": "ACCOUNT, OTHER",
        "FAIRTRIAL_NOT_SECRET": "DEMO_KEY",
        "ACCOUNT": "customer-support",
        "DEMO_KEY": KEY,
    }
    assert redact.environment_secrets(environ) == {"customer-support": "the value of $ACCOUNT"}


def test_passwords_in_urls_and_connection_strings_of_any_variable_are_secrets() -> None:
    environ = {"A": "postgresql://u:p%40ss%2Fword99@h/db", "B": "host=h password=dsnpassword99 user=u"}
    assert set(redact.environment_secrets(environ)) == {"p%40ss%2Fword99", "p@ss/word99", "dsnpassword99"}


@pytest.mark.parametrize("lead", [b"", b"u", b"us", b"user:"])
def test_a_known_secret_is_found_in_base64_wherever_it_stands(lead: bytes) -> None:
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        text = encode(lead + SECRET.encode() + b"?>" + lead).decode()
        for found in (Redactor([SECRET]).text(text), Redactor([SECRET]).json(json.dumps(text))):
            assert "[redacted]" in found
            assert len(found) - len("[redacted]") <= len(encode(lead + b"?>" + lead)) + 6


def test_a_known_secret_in_stored_bytes_is_replaced() -> None:
    assert "[redacted]" in Redactor([SECRET]).json(dumps({"raw": f"key {SECRET}".encode()}))


def test_a_known_secret_is_found_percent_encoded() -> None:
    secret = "p@ss/word+99 é"
    for form in (quote(secret), quote(secret, safe=""), quote_plus(secret), quote(secret, safe="").lower()):
        assert Redactor([secret]).text(f"https://h/?x={form}&y") == "https://h/?x=[redacted]&y"


CREDENTIALS = [
    ("key sk-proj-Abc123_def-456GHI789 here", "key [redacted] here"),
    ("sk-ant-api03-" + "Ab1-" * 8, "[redacted]"),
    ("sk-" + "a1B2" * 8, "[redacted]"),
    ("rk_live_0123456789abcdefXY", "[redacted]"),
    ("sk_test_0123456789abcdefXY", "[redacted]"),
    ("ghp_abcdefghijklmnop1234", "[redacted]"),
    ("github_pat_11ABCDEFG0abcdefghijkl_mnop", "[redacted]"),
    ("glpat-abcdefghij0123456789", "[redacted]"),
    ("id AKIAABCDEFGHIJKLMNOP.", "id [redacted]."),
    ("id ASIAABCDEFGHIJKLMNOP.", "id [redacted]."),
    ("AIza" + "SyA-1234567890_abcdefghijklmnopqrst", "[redacted]"),
    ("xoxb-1234567890-abcdef", "[redacted]"),
    ("https://hooks.slack.com/services/T000/B000/XXXXXXXXXXXXXXXX", "https://hooks.slack.com/services/[redacted]"),
    ("hf_" + "abcDEF0123" * 3, "[redacted]"),
    ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9P", "[redacted]"),
    ("-----BEGIN RSA PRIVATE KEY-----\n" + "MIIEow0123456789+/ab\n" * 4 + "-----END RSA PRIVATE KEY-----",
     "-----BEGIN RSA PRIVATE KEY-----[redacted]-----END RSA PRIVATE KEY-----"),
    ("Authorization: Bearer somebearertoken123456", "Authorization: Bearer [redacted]"),
    ("authorization: basic dXNlcjpwYXNz", "authorization: basic [redacted]"),
    ("AUTHORIZATION: Token abcdefghij", "AUTHORIZATION: Token [redacted]"),
    ("Bearer abcdefghijklmno12", "Bearer [redacted]"),
    ("bearer abcdefghijklmno12", "bearer [redacted]"),
    ("Basic dXNlcjpwYXNzd29yZDEyMw==", "Basic [redacted]"),
    ("https://h/x?api_key=querysecret12345&token=tok123456789",
     "https://h/x?api_key=[redacted]&token=[redacted]"),
    ("host=h password=dsnpassword99 user=u", "host=h password=[redacted] user=u"),
    ("Server=h;Uid=u;Pwd=dsnpassword99;", "Server=h;Uid=u;Pwd=[redacted];"),
    ("redis://user:secretpw12@host/0", "redis://user:[redacted]@host/0"),
    ("redis://user:sec/retpw12@host/0", "redis://user:[redacted]@host/0"),
    ("redis://user:sec://retpw12@host/0", "redis://user:[redacted]@host/0"),
    ("redis://user:sec@retpw12@host/0", "redis://user:[redacted]@host/0"),
    ("https://ghx_tokenintheuserpart99@github.com/x", "https://[redacted]@github.com/x"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "redacted"), CREDENTIALS)
def test_text_in_the_shape_of_a_credential_is_replaced(text: str, redacted: str) -> None:
    redactor = Redactor()
    assert redactor.text(text) == redacted
    assert redactor.text(f"\n{text}\n") == f"\n{redacted}\n"
    assert json.loads(redactor.json(json.dumps({"a": f"x\n{text}\ty"}))) == {"a": f"x\n{redacted}\ty"}
    assert json.loads(redactor.data(json.dumps([text]).encode())) == [redacted]
    assert redactor.data(b"\xff " + text.encode()) == b"\xff " + redacted.encode()


def test_every_format_of_the_list_has_an_example_and_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "redaction.md").read_text(encoding="utf-8")
    for known in FORMATS:
        assert any(re.search(pattern, text) for text, _ in CREDENTIALS for pattern in known.patterns), known.name
        assert f"| {known.name} |" in page


@pytest.mark.parametrize(
    "text",
    [
        "sk-learn-pipeline-for-text-classification-2",
        "the task-abcdefghij0123456789 desk-abcdefghij0123456789",
        "Basic understanding of internationalization",
        "the bearer of internationalization",
        "connect(host=h, user=u, password=secret_value)",
        "password = input('password: ')",
        "http://localhost:8080/users/@me",
        "https://first.last-name.of-user@host/",
        "see https://example.com/a:b@c",
        "mail me@example.com?subject=x",
        "https://h/?page=12345678&keyword=abcdefghij",
        "AKIAABCDEFGHIJKLMNOPQR",
        "-----BEGIN PUBLIC KEY-----\nMIIB" + "A" * 60,
        "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    ],
)
def test_ordinary_text_is_left_alone(text: str) -> None:
    assert Redactor().text(text) is text
    assert Redactor().json(encoded := json.dumps(text)) is encoded


def test_a_header_in_json_is_redacted_where_its_name_and_its_value_are_two_strings() -> None:
    text = json.dumps({"headers": {"Authorization": "Bearer abcdefghijkl"}, "n": 1})
    assert json.loads(Redactor().json(text)) == {"headers": {"Authorization": "Bearer [redacted]"}, "n": 1}


def test_a_private_key_before_an_escaped_quote_leaves_json_behind() -> None:
    key = "-----BEGIN PRIVATE KEY-----\n" + "MIIEow0123456789+/ab\n" * 4
    for ending in ('"quoted"', "\\", '\\"'):
        redacted = Redactor().json(json.dumps({"a": key + ending, "b": "c"}))
        assert json.loads(redacted) == {"a": "-----BEGIN PRIVATE KEY-----[redacted]" + ending, "b": "c"}


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
    """Put a secret everywhere a task, a model or an evaluator can."""
    nested = json.dumps({"said": secret})
    run = store.create_run(run_record(notes={"n": [secret]}))
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
    committed = store.commit("r1", batch, {0: Sample("s0", 0), 1: Sample("s1", 1)})
    assert committed == (3, 0, (), ())


def scan(column: Any) -> str:
    """A stored value as text that can be searched, decompressed if need be."""
    data = decompress(bytes(column)) if isinstance(column, bytes | memoryview) else str(column).encode()
    text = data.decode("utf-8", "replace")
    return text + text.replace("\\", "")


def everything_read(store: RunStore) -> str:
    parts: list[Any] = [store.runs(), list(store.labels("r1")), store.totals("r1"), store.metric_totals("r1")]
    parts += [(found, found.output, found.snapshot, found.sample) for found in store.results("r1", snapshots=True)]
    return repr(parts)


SECRETS = pytest.mark.parametrize("secret", [SECRET, 'aw"kward\\secret', NUMBER])


class TestStores:
    @pytest.mark.parametrize(
        ("field", "changes"),
        [
            ("the suite's name", {"suite": f"s {SECRET}"}),
            ("the dataset's name", {"dataset_name": SECRET}),
            ("the dataset's version", {"dataset_version": SECRET}),
            ("the evaluator's name", {"evaluator": SECRET}),
            ("the suite's version", {"code_hash": f"version:{SECRET}"}),
            ("the name of an experiment", {"experiments": (SECRET, "b")}),
            ("the parameters of an experiment", {"params": {"terse": {"k": [SECRET]}}}),
            ("the suite's config", {"config": {"k": SECRET}}),
            ("the run's tags", {"tags": {"k": SECRET}}),
        ],
    )
    def test_a_run_with_a_secret_in_what_is_stored_unchanged_is_refused(
        self, field: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SERVICE_API_KEY", SECRET)
        store = open_store("memory:")
        with pytest.raises(
            SecretInDataError, match=rf"{field} must not contain a secret .*\$SERVICE_API_KEY"
        ) as raised:
            store.create_run(run_record(**changes))
        assert SECRET not in str(raised.value)
        assert store.runs() == []

    @pytest.mark.parametrize(
        ("field", "sample"),
        [
            ("the input of sample 's0'", Sample("s0", {"k": [SECRET]})),
            ("the expected value of sample 's0'", Sample("s0", 1, SECRET)),
            ("the metadata of sample 's0'", Sample("s0", 1, 2, {SECRET: 1})),
        ],
    )
    def test_a_sample_with_a_secret_is_not_stored(self, store: RunStore, field: str, sample: Sample[Any, Any]) -> None:
        register_secret(SECRET)
        run = store.create_run(run_record())
        store.commit("r1", [result(run, 0)], {0: sample})
        [found] = store.results("r1")
        assert (found.outcome, found.stage, found.score) == ("task_error", "store", None)
        assert f"{field} must not contain a secret (it contains a registered secret)" in str(found.error)
        assert SECRET not in everything_read_runs(store)
        assert list(store.samples("r1")) == []

    def test_a_result_of_a_sample_with_a_secret_in_its_id_is_refused(self, store: RunStore, run: RunRecord) -> None:
        register_secret(SECRET)
        found = replace(result(run, 0), key=TrialKey("r1", "baseline", f"s {SECRET}", 0))
        committed = store.commit("r1", [found], {0: Sample(f"s {SECRET}", 1)})
        assert [why for _, why in committed.refused] == ["the id of its sample contains a secret"]
        assert list(store.sample_facts("r1")) == []

    def test_labels_and_attachments_with_a_secret_are_refused(self, store: RunStore, run: RunRecord) -> None:
        register_secret(SECRET)
        store.commit("r1", [result(run, 0)], {0: Sample("s0", 0)})
        key = TrialKey("r1", "baseline", "s0")
        for label in (Label(key, SECRET, 1, "me"), Label(key, "ok", [SECRET], "me"), Label(key, "ok", 1, SECRET)):
            with pytest.raises(SecretInDataError, match="of a label must not contain a secret"):
                store.label(label)
        with pytest.raises(SecretInDataError, match="an attachment"):
            store.put_blob(b"\xff" + SECRET.encode())

    def test_samples_that_look_like_credentials_are_stored_unchanged(self, store: RunStore, run: RunRecord) -> None:
        text = "is ghp_abcdefghijklmnop1234 a token? redis://u:secretpw12@h"
        store.commit("r1", [result(run, 0, output=text)], {0: Sample("s0", text, text, {"t": text})})
        [found] = store.results("r1")
        assert (found.sample.input, found.sample.expected, found.sample.metadata["t"]) == (text,) * 3
        assert found.redacted_parts == ("output",)

    @SECRETS
    def test_a_secret_never_comes_back_from_a_store(
        self, store: RunStore, secret: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SERVICE_API_KEY", secret)  # Set after the store was opened.
        plant(store, secret)
        text = everything_read(store)
        assert secret not in text
        assert secret.replace("\\", "\\\\") not in text
        assert text.count("[redacted]") > 10
        # What is not secret is still there, and what was replaced is named.
        [first] = store.results("r1", sample_ids=["s0"], outcomes=["scored"])
        assert first.score is not None
        assert first.score.reason == "because [redacted]"
        assert [metric.value for metric in first.score.metrics] == [1.0, 0.5]
        assert first.redacted_parts == ("output", "transcript", "reason", "score", "metadata")
        [failed] = store.results("r1", outcomes=["task_error"])
        assert (failed.redacted, failed.redacted_parts) == (True, ("error",))

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
        assert sum("[redacted]" in text for text in columns) > 8
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
        assert sum("[redacted]" in text for text in columns) > 8
        assert not [text for text in columns if secret in text or secret.replace("\\", "") in text]

    def test_the_password_of_a_postgresql_store_is_a_secret(
        self, pg_url: str, opened: Callable[[str], RunStore]
    ) -> None:
        store = opened(pg_url)
        run = store.create_run(run_record(notes={"store": pg_url}))
        store.commit("r1", [result(run, 0, "task_error", error="login store-test-password failed")])
        assert "store-test-password" not in everything_read_runs(store)


def everything_read_runs(store: RunStore) -> str:
    results = [{field.name: getattr(one, field.name) for field in fields(one)} for one in store.results("r1")]
    return repr([store.runs(), results])


@pytest.mark.parametrize("size", [0, 5_000])
@pytest.mark.parametrize("part", ["output", "transcript"])
def test_a_secret_in_one_trial_of_a_batch_is_redacted_in_that_trial_alone(part: str, size: int) -> None:
    run, secret, padding = run_record(size=3), "wK8-2mQ+pz71", "x" * size
    texts = [json.dumps(f"{padding} {secret if number == 1 else 'fine'}") for number in range(3)]
    given = [
        replace(
            result(run, number),
            output_json=texts[number] if part == "output" else '"fine"',
            snapshot=texts[number].encode() if part == "transcript" else b"{}",
        )
        for number in range(3)
    ]
    encoder = Encoder(run, 1, Redactor([secret]), bytes)
    encoder.search_batch(given)
    rows = [encoder.entry(one) for one in given]
    place = DETAIL_COLUMNS.index(part)
    written = [str(entry.detail[place]) for entry in rows if entry.detail is not None]
    assert [secret in text for text in written] == [False] * 3
    assert [REDACTED in text for text in written] == [False, True, False]
    assert [bool(entry.row[RESULT_COLUMNS.index("redacted")]) for entry in rows] == [False, True, False]
