"""action.yml and its script, with a server on loopback in place of the GitHub API."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from fairtrial import Dataset, EvalSuite, Sample, exact_match, open_store
from fairtrial._version import __version__
from tests.scripts import load_script

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "deploy" / "github" / "evals.py"
ACTION: Any = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
script: Any = load_script("../deploy/github/evals.py")


class GitHubApi:
    """Artifacts and comments of one repository, over HTTP."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str]] = []
        self.tokens: list[str | None] = []
        self.comments: list[dict[str, Any]] = []
        self.artifacts: list[tuple[dict[str, Any], bytes]] = []
        self.comment_status = 200
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *words: object) -> None:
                pass

            def answer(self, body: object, status: int = 200) -> None:
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def handle_call(self) -> None:
                outer.requests.append((self.command, self.path))
                outer.tokens.append(self.headers.get("Authorization"))
                length = int(self.headers.get("content-length") or 0)
                body: Any = json.loads(self.rfile.read(length)) if length else None
                path, _, query = self.path.partition("?")
                if path.startswith("/zip/"):
                    self.answer(outer.artifacts[int(path.rpartition("/")[2])][1])
                elif path.endswith("/actions/artifacts"):
                    self.answer({"artifacts": [facts for facts, _ in outer.artifacts]})
                elif "/comments" in path and outer.comment_status != 200:
                    self.answer({"message": "Resource not accessible by integration"}, outer.comment_status)
                elif self.command == "GET":
                    page = int(query.rpartition("page=")[2])
                    self.answer(outer.comments[100 * (page - 1) : 100 * page])
                elif self.command == "POST":
                    number = len(outer.comments) + 1
                    outer.comments.append({"id": number, "user": {"type": "Bot"}, **body})
                    self.answer({"id": number}, 201)
                else:
                    outer.comments[int(path.rpartition("/")[2]) - 1] |= body
                    self.answer({})

            do_GET = do_POST = do_PATCH = handle_call

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def add_artifact(self, files: dict[str, bytes], *, branch: str = "main", repository: int = 1, day: int = 1) -> None:
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as archive:
            for name, content in files.items():
                archive.writestr(name, content)
        facts = {
            "name": "fairtrial-store",
            "expired": False,
            "created_at": f"2026-01-{day:02}T00:00:00Z",
            "archive_download_url": f"{self.url}/zip/{len(self.artifacts)}",
            "workflow_run": {"repository_id": 1, "head_repository_id": repository, "head_branch": branch},
        }
        self.artifacts.append((facts, packed.getvalue()))


@pytest.fixture
def api() -> Iterator[GitHubApi]:
    api = GitHubApi()
    thread = threading.Thread(target=api.server.serve_forever)
    thread.start()
    yield api
    api.server.shutdown()
    thread.join()
    api.server.server_close()


def environment(place: Path, api: GitHubApi, *, event: dict[str, Any] | None = None, **changes: str) -> dict[str, str]:
    (place / "event.json").write_text(json.dumps(event or {}))
    return {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(place),
        "GITHUB_API_URL": api.url,
        "GITHUB_TOKEN": "secret-token",
        "GITHUB_EVENT_PATH": str(place / "event.json"),
        "GITHUB_EVENT_NAME": "pull_request" if event else "push",
        "GITHUB_REPOSITORY": "me/project",
        "GITHUB_SHA": "abc123",
        "GITHUB_REF_NAME": "main",
        "GITHUB_ACTOR": "me",
        "GITHUB_STEP_SUMMARY": str(place / "summary.md"),
        "GITHUB_OUTPUT": str(place / "output"),
        "EVALS_RUN": "letters:polite",
        "EVALS_MAX_COST": "1.00",
        "EVALS_STORE": "ci.db",
        "EVALS_GATE_ARGS": "--margin 0.2",
        **changes,
    }


def pull_request(head: str = "me/project") -> dict[str, Any]:
    return {
        "pull_request": {
            "number": 7,
            "base": {"ref": "main", "repo": {"full_name": "me/project"}},
            "head": {"ref": "idea", "repo": {"full_name": head} if head else None},
        }
    }


def run_action(place: Path, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the steps of action.yml that run our script; the exit code is that of the first that fails."""
    steps = [step for step in ACTION["runs"]["steps"] if SCRIPT.name in step.get("run", "")]
    done: list[subprocess.CompletedProcess[str]] = []
    for step in steps:
        if step["name"] == "Comment" and environ["GITHUB_EVENT_NAME"] != "pull_request":
            continue
        if any(each.returncode for each in done) and "!cancelled()" not in step.get("if", ""):
            continue
        given = {name: value for name, value in environ.items() if name != "GITHUB_TOKEN" or name in step["env"]}
        given |= {"ACTION_PATH": str(ROOT), "EVALS_COMMENT": str(place / "comment.md")}
        command = ["bash", "-e", "-c", step["run"]]
        done.append(subprocess.run(command, cwd=place, env=given, capture_output=True, text=True, check=False))
    code = next((each.returncode for each in done if each.returncode), 0)
    said = ["".join(each.stdout for each in done), "".join(each.stderr for each in done)]
    return subprocess.CompletedProcess([], code, *said)


@pytest.mark.proves("R159")
@pytest.mark.parametrize(
    ("head", "actor"), [("stranger/project", "stranger"), ("", "me"), ("me/project", "dependabot[bot]")]
)
def test_what_has_no_secrets_ends_neutral_and_spends_nothing(
    head: str, actor: str, tmp_path: Path, api: GitHubApi
) -> None:
    # There is no project and no key here: anything that ran would fail.
    done = run_action(tmp_path, environment(tmp_path, api, event=pull_request(head), GITHUB_ACTOR=actor))
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "output").read_text() == "result=skipped\n"
    assert "nothing is spent" in (tmp_path / "summary.md").read_text()
    assert api.requests == []
    assert not (tmp_path / "ci.db").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"GITHUB_EVENT_NAME": "pull_request_target"}, "use pull_request"),
        ({"EVALS_RUN": "letters"}, "run must name a suite and an experiment"),
        ({"EVALS_MAX_COST": ""}, "max-cost must be set"),
        ({"EVALS_BASELINE": "branch"}, "baseline must be artifact or store"),
        ({"EVALS_INCONCLUSIVE": "maybe"}, "inconclusive must be warn or fail"),
        ({"EVALS_STORE": "postgresql://db/evals"}, "needs baseline: store"),
    ],
)
def test_unsafe_events_and_wrong_settings_are_refused(
    changes: dict[str, str], message: str, tmp_path: Path, api: GitHubApi
) -> None:
    done = run_action(tmp_path, environment(tmp_path, api, event=pull_request(), **changes))
    assert done.returncode == 2
    assert message in done.stdout
    assert api.requests == []


def settings(place: Path, api: GitHubApi) -> Any:
    return script.Settings.read(environment(place, api, event=pull_request()))


def test_only_the_newest_artifact_of_the_base_branch_of_this_repository_is_used(tmp_path: Path, api: GitHubApi) -> None:
    target = tmp_path / "stores" / "ci.db"
    github = script.GitHub({"GITHUB_API_URL": api.url, "GITHUB_TOKEN": "secret-token"})
    api.add_artifact({"ci.db": b"a fork's main"}, repository=2, day=9)
    api.add_artifact({"ci.db": b"another branch"}, branch="idea", day=8)
    assert not script.fetch_store(github, settings(tmp_path, api), target)
    api.add_artifact({"ci.db": b"new"}, day=5)
    api.add_artifact({"ci.db": b"old"}, day=4)
    assert script.fetch_store(github, settings(tmp_path, api), target)
    assert target.read_bytes() == b"new"
    assert set(api.tokens) == {"Bearer secret-token"}
    api.add_artifact({"../ci.db": b"outside"}, day=7)
    with pytest.raises(script.ActionError, match=r"must hold one \.db file"):
        script.fetch_store(github, settings(tmp_path, api), target)
    assert not (tmp_path / "ci.db").exists()


@pytest.mark.proves("R159")
def test_a_comment_is_written_once_and_then_replaced(tmp_path: Path, api: GitHubApi) -> None:
    github = script.GitHub({"GITHUB_API_URL": api.url, "GITHUB_TOKEN": "t"})
    person = {"user": {"type": "User"}}
    api.comments = [{"id": n, "body": "talk", **person} for n in range(1, 151)]
    api.comments[0]["body"] = "<!-- fairtrial: letters:polite -->\nnot by the action"
    script.comment(github, settings(tmp_path, api), "first")
    script.comment(github, settings(tmp_path, api), "second" + "x" * 100_000)
    ours = [comment["body"] for comment in api.comments if comment["user"]["type"] == "Bot"]
    assert len(ours) == 1
    assert ours[0].startswith("<!-- fairtrial: letters:polite -->\nsecond")
    assert len(ours[0]) < 65_536
    assert api.comments[0]["body"].endswith("not by the action")


def test_a_token_that_may_not_comment_is_no_failure(
    tmp_path: Path, api: GitHubApi, capsys: pytest.CaptureFixture[str]
) -> None:
    api.comment_status = 403
    script.comment(script.GitHub({"GITHUB_API_URL": api.url}), settings(tmp_path, api), "text")
    assert "permissions: pull-requests: write" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.proves("R159")
def test_a_push_makes_the_baseline_and_a_pull_request_is_gated_against_it(tmp_path: Path, api: GitHubApi) -> None:
    command = [sys.executable, "-m", "fairtrial.cli", "init", ".", "--template", "judge"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    pushed = run_action(tmp_path, environment(tmp_path, api))
    assert pushed.returncode == 0, pushed.stderr
    assert "nothing was gated" in (tmp_path / "summary.md").read_text()
    api.add_artifact({"ci.db": (tmp_path / "ci.db").read_bytes()})
    (tmp_path / "ci.db").unlink()

    fine = run_action(tmp_path, environment(tmp_path, api, event=pull_request(), GITHUB_SHA="def456"))
    assert fine.returncode == 0, fine.stderr
    assert (tmp_path / "output").read_text().splitlines()[-1] == "result=pass"
    (comment,) = api.comments
    assert "Evals: pass" in comment["body"]
    assert {run.tags["branch"] for run in open_store(str(tmp_path / "ci.db")).runs()} == {"main", "pull request"}

    evals = tmp_path / "evals.py"
    evals.write_text(evals.read_text().replace('if "sorry" in instructions', "if False"))
    worse = run_action(tmp_path, environment(tmp_path, api, event=pull_request(), GITHUB_SHA="789abc"))
    assert worse.returncode == 1, worse.stderr
    assert len(api.comments) == 1
    assert "Evals: fail" in api.comments[0]["body"]
    assert "secret-token" not in worse.stdout + worse.stderr


@pytest.mark.long
@pytest.mark.proves("R159")
def test_a_baseline_in_a_shared_database_is_found_behind_the_runs_of_many_pull_requests(
    tmp_path: Path, api: GitHubApi, pg_url: str
) -> None:
    command = [sys.executable, "-m", "fairtrial.cli", "init", ".", "--template", "judge"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    shared: dict[str, Any] = {"EVALS_STORE": pg_url, "EVALS_BASELINE": "store"}
    pushed = run_action(tmp_path, environment(tmp_path, api, **shared))
    assert pushed.returncode == 0, pushed.stderr
    one = EvalSuite("letters", Dataset([Sample("a", "a", "a")]), lambda text: text, exact_match)
    for number in range(25):
        one.run_sync(store=pg_url, tags={"branch": "pull request", "commit": f"other{number}"}, resume="never")

    evals = tmp_path / "evals.py"
    evals.write_text(evals.read_text().replace('if "sorry" in instructions', "if False"))
    event = pull_request()
    worse = run_action(tmp_path, environment(tmp_path, api, event=event, GITHUB_SHA="789abc", **shared))
    assert worse.returncode == 1, worse.stdout + worse.stderr
    assert "Evals: fail" in api.comments[0]["body"]
    said = worse.stdout + worse.stderr + (tmp_path / "summary.md").read_text() + api.comments[0]["body"]
    assert "store-test-password" not in said
    away = {**shared, "EVALS_STORE": "postgresql://127.0.0.1:1/none", "FAIRTRIAL_PATIENCE_SECONDS": "1"}
    gone = run_action(tmp_path, environment(tmp_path, api, event=event, **away))
    assert gone.returncode == 3  # Neither "no baseline yet" nor "too little data to decide".
    assert "Evals: error" in api.comments[0]["body"]


def test_examples_in_the_documentation_use_the_action_of_this_release_and_no_branch() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    used = [name for page in pages for name in re.findall(r"uses: fairtrial/fairtrial@(\S+)", page.read_text())]
    assert set(used) == {f"v{__version__}"}


def test_the_action_passes_settings_as_variables_and_pins_what_it_uses() -> None:
    steps = ACTION["runs"]["steps"]
    assert all("${{" not in step.get("run", "") for step in steps)
    used = [step["uses"] for step in steps if "uses" in step]
    assert used
    assert all(len(use.partition("@")[2]) == 40 for use in used)
    read = SCRIPT.read_text(encoding="utf-8")
    for step in (step for step in steps if SCRIPT.name in step.get("run", "")):
        variables = [name for name in step["env"] if name.startswith("EVALS_")]
        given = {name.removeprefix("EVALS_").lower().replace("_", "-") for name in variables}
        assert given == set(ACTION["inputs"]) - {"install", "token"} | {"comment"}
        assert all(f'"{name}"' in read for name in variables)


SPYING = """
import os, pathlib
from fairtrial import Dataset, EvalSuite, Experiment, exact_match

def spy():
    found = "GITHUB_ENV" in os.environ
    for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
        try:
            found |= b"secret-" b"token" in path.read_bytes()
        except OSError:
            pass
    with open("spied", "a") as file:
        file.write(f"{found}\\n")

def task(text):
    spy()
    os.path.lexists("comment.md") or os.symlink("/proc/self/environ", "comment.md")
    return text

spy()
data = Dataset.of({"a": "a"}, name="letters")
suite = EvalSuite("letters", data, task, exact_match, experiments=[Experiment("polite")])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_code_of_the_suites_finds_the_token_in_no_environment(tmp_path: Path, api: GitHubApi) -> None:
    (tmp_path / "evals.py").write_text(SPYING)
    environ = environment(tmp_path, api, event=pull_request(), EVALS_SUITES="evals.py", GITHUB_ENV="env")
    done = run_action(tmp_path, environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert set((tmp_path / "spied").read_text().split()) == {"False"}
    (comment,) = api.comments
    assert "nothing was gated" in comment["body"]
    assert set(api.tokens) == {"Bearer secret-token"}


def test_a_comment_that_leads_to_another_file_is_not_written(tmp_path: Path, api: GitHubApi) -> None:
    environ = environment(tmp_path, api, event=pull_request(), EVALS_COMMENT=str(tmp_path / "comment.md"))
    (tmp_path / "comment.md").symlink_to("/proc/self/environ")
    assert script.main("comment", environ) == script.MISUSE
    (tmp_path / "comment.md").unlink()
    os.mkfifo(tmp_path / "comment.md")
    assert script.main("comment", environ) == script.MISUSE
    (tmp_path / "comment.md").unlink()
    assert script.main("comment", environ) == 0
    assert api.comments == []


@pytest.mark.parametrize(("limit", "size"), [("_MAX_STORE", 1_999), ("_MAX_ARTIFACT", 100)])
def test_a_store_that_expands_beyond_a_limit_is_refused(
    limit: str, size: int, tmp_path: Path, api: GitHubApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, limit, size)
    github = script.GitHub({"GITHUB_API_URL": api.url, "GITHUB_TOKEN": "secret-token"})
    api.add_artifact({"ci.db": bytes(2_000)})
    with pytest.raises(script.ActionError, match=r"1999 are read|larger than 100 bytes"):
        script.fetch_store(github, settings(tmp_path, api), tmp_path / "ci.db")
    assert not (tmp_path / "ci.db").exists()
