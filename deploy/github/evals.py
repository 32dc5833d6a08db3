#!/usr/bin/env python3
"""Runs evals for a commit and, on a pull request, gates them against the base branch and comments. For action.yml.

evals.py fetch      download the store of the base branch; needs GITHUB_TOKEN
evals.py run        run and gate; writes the comment to a file, because code of the suites can read the environment of
                    every process that it runs in or beneath
evals.py comment    write that comment to the pull request; needs GITHUB_TOKEN

Needs Python's standard library and the command `fairtrial`. Settings come from variables, never from arguments, so that
nothing a pull request says becomes part of a command line:

EVALS_SUITES, EVALS_RUN, EVALS_GATE_ARGS, EVALS_MAX_COST, EVALS_STORE, EVALS_BASELINE, EVALS_ARTIFACT,
EVALS_INCONCLUSIVE, EVALS_COMMENT
"""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PASS, FAIL, MISUSE, INCONCLUSIVE = 0, 1, 2, 3
_TIMEOUT = 60
# The token, if the job has it, and files that set the environment and the outputs of this and later steps.
_NOT_FOR_SUITES = ("GITHUB_TOKEN", "GITHUB_ENV", "GITHUB_PATH", "GITHUB_OUTPUT", "GITHUB_STATE")
_MAX_ARTIFACT = 2 * 1024**3
_MAX_STORE = 4 * 1024**3
_MAX_COMMENT = 60_000  # Characters; GitHub takes 65,536.


class ActionError(Exception):
    """The action cannot go on; the message says why and what to do."""


@dataclass(frozen=True)
class Settings:
    """What the workflow asked for, and what GitHub says about the event."""

    suites: list[str]
    run: str
    gate_args: list[str]
    max_cost: str
    store: str
    baseline: str
    artifact: str
    inconclusive: str
    comment_file: Path
    event_name: str
    event: Mapping[str, Any]
    repository: str
    sha: str
    branch: str
    actor: str

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Settings:
        """Read and check the variables."""
        event_path = environ.get("GITHUB_EVENT_PATH", "")
        event = json.loads(Path(event_path).read_text(encoding="utf-8")) if event_path else {}
        found = cls(
            suites=environ.get("EVALS_SUITES", "").split(),
            run=environ.get("EVALS_RUN", "").strip(),
            gate_args=shlex.split(environ.get("EVALS_GATE_ARGS", "")),
            max_cost=environ.get("EVALS_MAX_COST", "").strip(),
            store=environ.get("EVALS_STORE", "").strip() or ".fairtrial/ci.db",
            baseline=environ.get("EVALS_BASELINE", "").strip() or "artifact",
            artifact=environ.get("EVALS_ARTIFACT", "").strip() or "fairtrial-store",
            inconclusive=environ.get("EVALS_INCONCLUSIVE", "").strip() or "warn",
            comment_file=Path(environ.get("EVALS_COMMENT", "").strip() or ".fairtrial-comment.md"),
            event_name=environ.get("GITHUB_EVENT_NAME", ""),
            event=event,
            repository=environ.get("GITHUB_REPOSITORY", ""),
            sha=environ.get("GITHUB_SHA", ""),
            branch=environ.get("GITHUB_REF_NAME", ""),
            actor=environ.get("GITHUB_ACTOR", ""),
        )
        found._check()
        return found

    def _check(self) -> None:
        if self.event_name in ("pull_request_target", "workflow_run", "issue_comment"):
            raise ActionError(
                f"{self.event_name} gives code of a pull request the secrets of the repository: use pull_request"
            )
        if ":" not in self.run:
            raise ActionError(f"run must name a suite and an experiment, as in support:careful (got {self.run!r})")
        if self.baseline not in ("artifact", "store"):
            raise ActionError(f"baseline must be artifact or store (got {self.baseline!r})")
        if self.inconclusive not in ("warn", "fail"):
            raise ActionError(f"inconclusive must be warn or fail (got {self.inconclusive!r})")
        if not self.max_cost:
            raise ActionError("max-cost must be set: the most that one run may cost, in dollars")
        if self.baseline == "artifact" and "://" in self.store:
            raise ActionError("a store with an address needs baseline: store")

    @property
    def pull_request(self) -> Mapping[str, Any] | None:
        """The pull request, if there is one."""
        return self.event.get("pull_request")

    @property
    def base(self) -> str:
        """The branch to compare with."""
        return str(self.pull_request["base"]["ref"]) if self.pull_request else self.branch

    @property
    def untrusted(self) -> str:
        """Why this event gets no secrets and may spend nothing; empty if it may."""
        if self.pull_request is not None:
            head = self.pull_request["head"].get("repo") or {}
            if head.get("full_name") != self.repository:
                return "the pull request comes from a fork"
        if self.actor == "dependabot[bot]":
            return "Dependabot started it"
        return ""


class GitHub:
    """The few calls of the GitHub API that are needed."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._url = environ.get("GITHUB_API_URL", "https://api.github.com").rstrip("/")
        self._token = environ.get("GITHUB_TOKEN", "")

    def call(self, method: str, path: str, body: object = None) -> bytes:
        """Send one request; errors of HTTP are raised."""
        url = path if path.startswith(self._url) else f"{self._url}{path}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, method=method)
        request.add_header("Accept", "application/vnd.github+json")
        # Not sent on to the storage that artifacts are redirected to.
        request.add_unredirected_header("Authorization", f"Bearer {self._token}")
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
            content: bytes = answer.read(_MAX_ARTIFACT + 1)
        if len(content) > _MAX_ARTIFACT:
            raise ActionError(f"{urllib.parse.urlsplit(url).path} is larger than {_MAX_ARTIFACT} bytes")
        return content

    def pages(self, path: str) -> Iterator[Any]:
        """The answers page by page, until an empty one."""
        separator = "&" if "?" in path else "?"
        for page in range(1, 101):
            found = json.loads(self.call("GET", f"{path}{separator}per_page=100&page={page}"))
            yield found
            if len(found["artifacts"] if isinstance(found, dict) else found) < 100:
                return


def fetch_store(github: GitHub, settings: Settings, target: Path) -> bool:
    """Download the newest store that the base branch uploaded; False if there is none."""
    query = urllib.parse.urlencode({"name": settings.artifact})
    candidates = [
        artifact
        for page in github.pages(f"/repos/{settings.repository}/actions/artifacts?{query}")
        for artifact in page["artifacts"]
        if not artifact["expired"] and _from_base(artifact.get("workflow_run") or {}, settings)
    ]
    if not candidates:
        return False
    newest = max(candidates, key=lambda artifact: artifact["created_at"])
    archive = zipfile.ZipFile(io.BytesIO(github.call("GET", newest["archive_download_url"])))
    names = [name for name in archive.namelist() if name.endswith(".db") and "/" not in name and "\\" not in name]
    if len(names) != 1:
        raise ActionError(f"artifact {settings.artifact!r} must hold one .db file (got {archive.namelist()})")
    if (size := archive.getinfo(names[0]).file_size) > _MAX_STORE:  # No more than this is expanded.
        raise ActionError(
            f"{names[0]} in artifact {settings.artifact!r} has {size} bytes; at most {_MAX_STORE} are read"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with archive.open(names[0]) as source, target.open("wb") as file:
        shutil.copyfileobj(source, file)
    return True


def _from_base(run: Mapping[str, Any], settings: Settings) -> bool:
    """A fork can have a branch of the same name: only runs of this repository count."""
    same = run.get("head_repository_id") == run.get("repository_id")
    return same and run.get("head_branch") == settings.base


def fairtrial(*words: str, summary: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command; what it says is shown in the log of the job."""
    environ = {**os.environ, "GITHUB_STEP_SUMMARY": "" if summary is None else str(summary)}
    for name in _NOT_FOR_SUITES:
        environ.pop(name, None)
    done = subprocess.run(["fairtrial", *words], capture_output=True, text=True, check=False, env=environ)
    if "--json" not in words:
        sys.stdout.write(done.stdout)
    sys.stderr.write(done.stderr)
    sys.stdout.flush()
    return done


def baseline_of(settings: Settings, own: str) -> str | None:
    """The newest finished run of the base branch, as NAME:EXPERIMENT; None if the store has none."""
    suite, _, experiment = settings.run.partition(":")
    found = [
        run
        for run in runs_of(settings, suite, f"branch={settings.base}")
        if run["status"] == "finished"
        and run["name"] != own
        and any(part["experiment"] == experiment for part in run["experiments"])
    ]
    return f"{max(found, key=lambda run: run['number'])['name']}:{experiment}" if found else None


def runs_of(settings: Settings, suite: str, tag: str) -> list[Any]:
    """The newest runs of a suite with a tag: a shared store has runs of many pull requests between two of a branch."""
    done = fairtrial("runs", suite, "--tag", tag, "--limit", "100", "--store", settings.store, "--json")
    if done.returncode:
        raise ActionError(f"the runs in the store cannot be listed (exit code {done.returncode})")
    return list(json.loads(done.stdout)["runs"])


def newest_run(settings: Settings) -> str:
    """The name of the run of this commit."""
    suite = settings.run.partition(":")[0]
    own = runs_of(settings, suite, f"commit={settings.sha}")
    if not own:
        raise ActionError(f"the store has no run of suite {suite!r} for this commit: is run named after a suite?")
    return str(max(own, key=lambda run: run["number"])["name"])


def execute(settings: Settings) -> int:
    """Run the suites of this commit, within the cost cap."""
    tags = [f"commit={settings.sha}"]
    # Only a push to the branch itself makes a baseline.
    tags.append(f"branch={settings.branch}" if settings.pull_request is None else "branch=pull request")
    words = ["run", *settings.suites, "--store", settings.store, "--max-cost", settings.max_cost]
    return fairtrial(*words, *(word for tag in tags for word in ("--tag", tag))).returncode


def decide(settings: Settings, summary: Path) -> tuple[int, str]:
    """Gate the run of this commit; returns the exit code and what to say."""
    own = newest_run(settings)
    experiment = settings.run.partition(":")[2]
    words = ["gate", f"{own}:{experiment}", "--store", settings.store, *settings.gate_args]
    baseline = baseline_of(settings, own) if settings.pull_request is not None else None
    if baseline is not None:
        words += ["--baseline", baseline]
    done = fairtrial(*words, summary=summary)
    text = summary.read_text(encoding="utf-8") if summary.exists() else ""
    if done.returncode == MISUSE and baseline is None and "needs a baseline" in done.stderr:
        return PASS, f"No run of branch `{settings.base}` to compare with yet: nothing was gated."
    return done.returncode, text or f"The gate ended with exit code {done.returncode}:\n\n{_fenced(done.stderr)}"


def _fenced(text: str) -> str:
    return "    " + text.strip().replace("\n", "\n    ")


def comment(github: GitHub, settings: Settings, text: str) -> None:
    """Write one comment on the pull request, or replace the one of the last time."""
    if settings.pull_request is None:
        return
    marker = f"<!-- fairtrial: {settings.run} -->"
    body = f"{marker}\n{text}"
    if len(body) > _MAX_COMMENT:
        body = f"{body[:_MAX_COMMENT]}\n\n(cut; the summary of the job has the rest)"
    path = f"/repos/{settings.repository}/issues"
    try:
        own = [
            each["id"]
            for page in github.pages(f"{path}/{settings.pull_request['number']}/comments")
            for each in page
            if each["body"].startswith(marker) and each["user"]["type"] == "Bot"
        ]
        if own:
            github.call("PATCH", f"{path}/comments/{own[0]}", {"body": body})
        else:
            github.call("POST", f"{path}/{settings.pull_request['number']}/comments", {"body": body})
    except urllib.error.HTTPError as error:
        if error.code not in (403, 404):
            raise
        print(f"::notice::no comment was written ({error.code}): the job needs permissions: pull-requests: write")


def report(environ: Mapping[str, str], text: str, result: str) -> None:
    """Append to the summary of the job, and set the output of the step."""
    for variable, line in (("GITHUB_STEP_SUMMARY", f"{text.rstrip()}\n\n"), ("GITHUB_OUTPUT", f"result={result}\n")):
        if environ.get(variable):
            with open(environ[variable], "a", encoding="utf-8") as file:
                file.write(line)


def main(phase: str, environ: Mapping[str, str]) -> int:
    """Run one of `PHASES`; the exit code is that of the step."""
    try:
        settings = Settings.read(environ)
        if not settings.untrusted:
            return PHASES[phase](settings, environ)
        if phase == "run":
            text = f"Evals were skipped: {settings.untrusted}, so there are no secrets and nothing is spent."
            print(f"::notice::{text}")
            report(environ, text, "skipped")
        return 0
    except ActionError as error:
        print(f"::error::{error}")
        return MISUSE


def _fetch(settings: Settings, environ: Mapping[str, str]) -> int:
    if settings.baseline == "artifact" and not fetch_store(GitHub(environ), settings, Path(settings.store)):
        print(f"::notice::branch {settings.base} has no artifact {settings.artifact!r} yet")
    return 0


def _evaluate(settings: Settings, environ: Mapping[str, str]) -> int:
    settings.comment_file.unlink(missing_ok=True)
    code = execute(settings)
    if code in (PASS, FAIL):
        with tempfile.TemporaryDirectory() as folder:
            code, text = decide(settings, Path(folder, "gate.md"))
        result = {PASS: "pass", FAIL: "fail", INCONCLUSIVE: "inconclusive"}.get(code, "error")
    else:  # Also 3: a run that ended early, or without its store, was not decided about.
        text, result = f"The run ended with exit code {code}; see the log of the job.", "error"
    report(environ, text, result)
    settings.comment_file.unlink(missing_ok=True)  # What code of the suites may have put there.
    settings.comment_file.write_text(f"**Evals: {result}**\n\n{text}", encoding="utf-8")
    if result == "inconclusive" and settings.inconclusive == "warn":
        print("::warning::the evals are inconclusive: too little data to decide")
        return 0
    return code


def _comment(settings: Settings, environ: Mapping[str, str]) -> int:
    try:  # A link could lead to a file with the token, such as the environment of this process.
        descriptor = os.open(settings.comment_file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return 0  # Nothing was run.
    except OSError as error:
        raise ActionError(f"the comment cannot be read: {error.strerror}") from None
    with open(descriptor, encoding="utf-8", errors="replace") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ActionError("the comment must be a file")
        comment(GitHub(environ), settings, file.read(_MAX_COMMENT + 1))
    return 0


PHASES: dict[str, Callable[[Settings, Mapping[str, str]], int]] = {
    "fetch": _fetch,
    "run": _evaluate,
    "comment": _comment,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1], os.environ))
