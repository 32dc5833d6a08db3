"""Runs as experiments of LangSmith: what is sent, sending it again, refusals, and a server that is killed."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fairtrial import Dataset, EvalConfig, EvalSuite, Experiment, Metric, Sample, Score, TrialContext, exact_match, task
from fairtrial.data.session import PromptExecuted, TokenUsage
from fairtrial.errors import ConfigurationError, TraceSendError
from fairtrial.integrations.tracing import upload_run
from fairtrial.integrations.tracing.langsmith import UploadTotals, resolve_langsmith, upload_requests, write_experiments
from fairtrial.store import RunRecord, RunStore, open_store, redact, register_secret
from fairtrial.trials.context import trace_id_of
from tests.integrations.tracing.collector import Answer
from tests.integrations.tracing.langsmith_server import KEY, LangSmithServer, experiments
from tests.integrations.tracing.test_send import assert_within
from tests.servers import free_port

ROOT = Path(__file__).parents[3]
WORDS = ("Oslo", "snow", "because", "too cold", "thorough")  # What only content contains.


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redact, "_registered", {})
    monkeypatch.setenv("LANGSMITH_API_KEY", KEY)
    for name in ("LANGSMITH_ENDPOINT", "LANGSMITH_WORKSPACE_ID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "langsmith"
    place.mkdir()
    return place


@pytest.fixture
def server(folder: Path) -> Iterator[LangSmithServer]:
    with LangSmithServer(folder) as found:
        yield found


@task(inline=True)
def forecast(city: str, ctx: TrialContext) -> str:
    ctx.session.record(PromptExecuted("p", "openai", "gpt", TokenUsage(30, 5, cost_usd=0.25)))
    if city == "Lima":
        raise ValueError("too cold in Oslo")
    return f"snow in {city}"


def judge(output: str, expected: str) -> Score:
    if "Rome" in output:
        raise KeyError("no judge for Oslo")
    return Score(float(output == expected), output == expected, "because of snow", [Metric("words", 3.0)])


def stored_run(
    repeats: int = 1, experiments: int = 1, cities: tuple[str, ...] = ("Oslo", "Bern", "Lima", "Rome")
) -> tuple[RunStore, RunRecord]:
    store = open_store("memory:")
    samples = Dataset([Sample(f"s{n}", city, "snow in Oslo") for n, city in enumerate(cities)], name="cities")
    params = {"style": "thorough"}
    suite = EvalSuite(
        "forecast", samples, forecast, judge,
        experiments=[Experiment(f"e{n}", params=params) for n in range(experiments)],
        config=EvalConfig(repeats=repeats),
    )  # fmt: skip
    return store, suite.run_sync(store=store).run


def by_sample(experiment: Any) -> dict[str, Any]:
    return {row["run_metadata"]["sample_id"]: row for row in experiment["results"]}


class TestWhatIsSent:
    def test_every_trial_is_a_row_with_its_scores_tokens_times_and_the_id_of_its_trace(
        self, server: LangSmithServer, folder: Path
    ) -> None:
        store, run = stored_run()
        assert upload_run(store, run, server.url, content=True) == UploadTotals(created=1, trials=4)
        (found,) = experiments(folder)
        assert found["experiment_name"].startswith("forecast@1:e0 ")
        assert (found["dataset_name"], found["experiment_metadata"]["run_id"]) == ("cities", run.run_id)
        assert found["experiment_metadata"]["params"] == {"style": "thorough"}
        assert found["summary_experiment_scores"] == [
            {"key": "pass_rate", "score": 0.5, "comment": "1 of 2 scored trials passed, 2 without a score"}
        ]
        rows = by_sample(found)
        oslo = rows["s0"]
        assert (oslo["inputs"], oslo["expected_outputs"]) == ({"input": "Oslo"}, {"output": "snow in Oslo"})
        assert oslo["actual_outputs"] == {"output": "snow in Oslo"}
        assert oslo["evaluation_scores"] == [
            {"key": "judge", "score": 1.0, "value": "pass", "comment": "because of snow"},
            {"key": "words", "score": 3.0},
        ]
        facts = oslo["run_metadata"]
        assert (facts["input_tokens"], facts["output_tokens"], facts["cost_usd"]) == (30, 5, 0.25)
        first = next(iter(store.results(run.run_id)))
        assert facts["trace_id"] == trace_id_of(first.key, 1).hex()

    def test_an_error_of_the_task_is_one_of_the_row_and_one_of_the_evaluator_a_feedback(
        self, server: LangSmithServer, folder: Path
    ) -> None:
        store, run = stored_run()
        upload_run(store, run, server.url, content=True)
        rows = by_sample(experiments(folder)[0])
        assert rows["s2"]["error"] == "ValueError: too cold in Oslo"
        assert (rows["s2"]["evaluation_scores"], "actual_outputs" in rows["s2"]) == ([], False)
        assert "error" not in rows["s3"]
        (feedback,) = rows["s3"]["evaluation_scores"]
        assert (feedback["value"], "score" in feedback, "Oslo" in feedback["comment"]) == ("error", False, True)

    def test_no_content_is_sent_unless_it_is_asked_for(self, server: LangSmithServer, folder: Path) -> None:
        store, run = stored_run()
        upload_run(store, run, server.url)
        text = json.dumps(experiments(folder))
        assert [word for word in WORDS if word in text] == []
        rows = by_sample(experiments(folder)[0])
        assert (rows["s2"]["error"], rows["s0"]["inputs"]) == ("ValueError", {"sample_id": "s0"})
        upload_run(store, run, server.url, content=True)
        text = json.dumps(experiments(folder))
        assert [word for word in WORDS if word not in text] == []

    @pytest.mark.parametrize("content", [False, True])
    def test_no_secret_is_sent_wherever_it_stands(self, content: bool) -> None:
        secret = "sk-live-0123456789abcdefXYZ"
        key = {secret: [secret]}

        @task(inline=True)
        def leaks(given: Any) -> Any:
            if given == "fail":
                raise ValueError(f"{secret} is wrong")
            return {"answer": f"the key is {secret}", **key}

        def scored(output: Any, expected: Any) -> Score:
            return Score(1.0, True, f"because {secret}", [Metric(f"m {secret}", 1.0)], name=f"judge {secret}")

        samples: Dataset[Any, Any] = Dataset(
            [Sample(f"a {secret}", {"x": key}, [secret]), Sample("b", "fail")], name=f"set {secret}"
        )
        experiment = Experiment(f"e {secret}", params={"p": secret})
        store = open_store("memory:")
        suite = EvalSuite(f"suite {secret}", samples, leaks, scored, experiments=[experiment])
        run = suite.run_sync(store=store).run  # It is not known to be a secret yet.
        register_secret(secret)
        sent = b"".join(request.body for request in upload_requests(store, run, content=content))
        assert secret.encode() not in sent
        assert sent.count(b"[redacted]") > (12 if content else 6)

    def test_inputs_that_are_objects_are_sent_as_they_are_and_odd_text_as_question_marks(
        self, server: LangSmithServer, folder: Path
    ) -> None:
        store = open_store("memory:")
        samples: Dataset[Any, Any] = Dataset([Sample("a\udc80", {"question": "x"}, 1)], name="objects")
        run = EvalSuite("objects", samples, len, exact_match).run_sync(store=store).run
        upload_run(store, run, server.url, content=True)
        (row,) = experiments(folder)[0]["results"]
        assert (row["inputs"], row["run_metadata"]["sample_id"]) == ({"question": "x"}, "a?")

    def test_rows_of_the_same_sample_have_the_same_id_in_every_run_and_every_repeat_its_own(self) -> None:
        ids = []
        for content in (True, True, False):
            store, run = stored_run(repeats=2)
            trees = [json.loads(request.body) for request in upload_requests(store, run, content=content)]
            ids.append([row["row_id"] for tree in trees for row in tree["results"]])
        assert ids[0] == ids[1]
        assert len(set(ids[0] + ids[2])) == 16


class TestSendingAgain:
    def test_the_same_run_gives_the_same_requests_and_nothing_is_created_twice(
        self, server: LangSmithServer, folder: Path
    ) -> None:
        store, run = stored_run(experiments=3)
        assert upload_run(store, run, server.url) == UploadTotals(created=3, trials=12)
        first = [tree for _, tree in server.requests]
        assert upload_run(store, run, server.url) == UploadTotals(existing=3)
        assert [tree for _, tree in server.requests[3:]] == first
        assert len(experiments(folder)) == 3

    def test_another_run_of_the_same_suite_is_another_experiment_of_the_same_dataset(
        self, server: LangSmithServer, folder: Path
    ) -> None:
        for _ in range(2):
            store, run = stored_run()
            assert upload_run(store, run, server.url).created == 1
        found = experiments(folder)
        assert (len({each["experiment_name"] for each in found}), {each["dataset_name"] for each in found}) == (
            2, {"cities (without content)"},
        )  # fmt: skip

    def test_experiments_with_too_many_rows_are_uploaded_in_parts(self, server: LangSmithServer, folder: Path) -> None:
        store, run = stored_run(cities=tuple(f"city {n}" for n in range(7)))
        assert upload_run(store, run, server.url, max_rows=3) == UploadTotals(created=3, trials=7)
        names = [each["experiment_name"].rpartition(" ")[0] for each in experiments(folder)]
        assert sorted(names) == ["forecast@1:e0", "forecast@1:e0 part 2", "forecast@1:e0 part 3"]
        sizes = [len(tree["results"]) for _, tree in server.requests]
        samples = [row["run_metadata"]["sample_id"] for _, tree in server.requests for row in tree["results"]]
        assert (sizes, samples) == ([3, 3, 1], [f"s{n}" for n in range(7)])
        assert upload_run(store, run, server.url, max_rows=3) == UploadTotals(existing=3)

    def test_parts_are_limited_in_bytes_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("fairtrial.integrations.tracing.langsmith._MAX_BYTES", 1_500)
        store, run = stored_run(cities=tuple(f"{n} {'x' * 400}" for n in range(6)))
        requests = list(upload_requests(store, run, content=True))
        assert [len(request.sample_ids) for request in requests] == [1] * 6

    def test_a_server_that_is_killed_in_the_middle_ends_up_with_every_experiment_once(self, folder: Path) -> None:
        store, run = stored_run(experiments=3)
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        words = [sys.executable, "-m", "tests.integrations.tracing.langsmith_server", str(folder), str(port)]

        def started(*more: str) -> subprocess.Popen[str]:
            process = subprocess.Popen([*words, *more], cwd=ROOT, stdout=subprocess.PIPE, text=True)
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            return process

        # It keeps the second experiment, does not answer, and is killed then.
        with started("--silent-after", "1") as process:

            def kill() -> None:
                try:
                    assert_within(lambda: len(experiments(folder)) == 2)
                finally:
                    process.kill()

            killer = threading.Thread(target=kill)
            killer.start()
            with pytest.raises(TraceSendError, match=r"could not be sent within 0\.2 s: .*\(1 of its experiments"):
                upload_run(store, run, url, patience_seconds=0.2)
            killer.join()
        assert len(experiments(folder)) == 2
        with started() as process:
            try:
                assert upload_run(store, run, url) == UploadTotals(created=1, existing=2, trials=4)
            finally:
                process.terminate()
        found = experiments(folder)
        assert [each["experiment_metadata"]["experiment"] for each in found] == ["e0", "e1", "e2"]
        assert [len(each["results"]) for each in found] == [4, 4, 4]


class TestAnswers:
    def test_a_busy_server_is_asked_again(self, folder: Path) -> None:
        busy = [Answer(status, b"", {"Retry-After": "0"}) for status in (429, 503, 500, 502)]
        store, run = stored_run()
        with LangSmithServer(folder, busy) as server:
            assert upload_run(store, run, server.url).created == 1
            assert len(server.requests) == 5
            assert server.requests[0][1] == server.requests[4][1]

    def test_an_experiment_that_exists_after_an_attempt_without_an_answer_is_unconfirmed(self, folder: Path) -> None:
        store, run = stored_run()
        with LangSmithServer(folder) as server:
            upload_run(store, run, server.url)
        answers = [Answer(504, b"", {"Retry-After": "0"}), None]
        with LangSmithServer(folder, answers) as server:
            assert upload_run(store, run, server.url) == UploadTotals(unconfirmed=1)

    def test_a_refused_row_is_named_and_what_is_there_is_counted(self, folder: Path) -> None:
        details = [{"loc": ["body", "results", place, "inputs", "input"], "msg": "too long"} for place in (2, 0, 1, 3)]
        refusal = Answer(422, json.dumps({"detail": details}).encode())
        store, run = stored_run(experiments=2)
        with (
            LangSmithServer(folder, [None, refusal]) as server,
            pytest.raises(TraceSendError, match="was refused") as caught,
        ):
            upload_run(store, run, server.url)
        message = str(caught.value)
        assert "the server answered 422: sample 's2': inputs.input: too long; sample 's0'" in message
        assert message.endswith("; and 1 more (1 of its experiments are there)")

    @pytest.mark.parametrize(
        ("answer", "words"),
        [
            (Answer(403, b'{"detail":"Forbidden"}'), 'was refused: the server answered 403: {"detail":"Forbidden"}'),
            (Answer(413, b"too large"), "was refused: the server answered 413: too large"),
            (Answer(422, b'{"detail":"odd"}'), "was refused: the server answered 422"),
            (Answer(302, b"", {"Location": "http://127.0.0.1:1/"}), "was refused: the server answered 302"),
            (Answer(200, b"<html>Sign in</html>"), "is this the address of LangSmith?"),
            (Answer(200, b"[1]"), "is this the address of LangSmith?"),
        ],
    )
    def test_a_refusal_is_not_repeated_and_says_what_the_server_said(
        self, folder: Path, answer: Answer, words: str
    ) -> None:
        store, run = stored_run()
        with LangSmithServer(folder, [answer]) as server:
            with pytest.raises(TraceSendError) as caught:
                upload_run(store, run, server.url)
            assert len(server.requests) == 1
        assert words in str(caught.value)


class TestAddress:
    @pytest.mark.parametrize(
        "url", ["https://h", "https://h/", "https://h/api", "https://h/api/v1/", "https://h/api/v1/datasets/upload-experiment"]
    )  # fmt: skip
    def test_the_path_is_added_to_any_form_of_the_address(self, url: str) -> None:
        environ = {"LANGSMITH_API_KEY": "k", "LANGSMITH_ENDPOINT": url, "LANGSMITH_WORKSPACE_ID": "w"}
        expected = "https://h/api/v1/datasets/upload-experiment"
        assert resolve_langsmith(url, environ) == resolve_langsmith("env", environ)
        address, headers = resolve_langsmith(url, environ)
        assert (address, headers["x-api-key"], headers["x-tenant-id"]) == (expected, "k", "w")

    def test_a_missing_key_and_an_address_that_is_none_are_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="LANGSMITH_API_KEY must be set"):
            resolve_langsmith("env", {})
        with pytest.raises(ConfigurationError, match=r"must be an http:// or https:// URL \(got 'host:80'\)"):
            resolve_langsmith("host:80", {"LANGSMITH_API_KEY": "k"})
        store, run = stored_run()
        with pytest.raises(ConfigurationError, match=r"max_rows must be at least 1 \(got 0\)"):
            write_experiments(store, run, Path("x"), max_rows=0)

    def test_the_key_is_a_secret_from_then_on(self) -> None:
        resolve_langsmith("env", {"LANGSMITH_API_KEY": "zq81-some-key-4711"})
        assert "4711" not in redact.current().text("sent with zq81-some-key-4711")


def test_without_a_server_the_requests_are_written_as_lines(tmp_path: Path, folder: Path) -> None:
    store, run = stored_run(experiments=2)
    path = tmp_path / "run.jsonl"
    assert write_experiments(store, run, path, max_rows=3) == 4
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    with LangSmithServer(folder) as server:
        upload_run(store, run, server.url, max_rows=3)
        assert [tree for _, tree in server.requests] == lines
