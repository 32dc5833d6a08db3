"""The command gate, and its notifications."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from fairtrial.base.backoff import longest_pause
from fairtrial.cli import options
from fairtrial.cli.label_file import correcting_labels
from fairtrial.cli.screen import err
from fairtrial.cli.user_errors import UserError

if TYPE_CHECKING:
    from fairtrial.reports.figures.rules import GateRules


_TRIES = 3
_TIMEOUT_SECONDS = 5.0
_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 8.0
_SLACK = "slack+"


def check_address(url: str) -> None:
    """Raise a `UserError` unless this is the address of a webhook."""
    parts = urlsplit(url.removeprefix(_SLACK))
    if parts.scheme not in ("http", "https") or not parts.hostname:
        # Do not print the address: anyone who knows it can post to the webhook.
        raise UserError(
            f"--notify must be the http or https address of a webhook (got one with scheme {parts.scheme!r})",
            "as in: --notify https://hooks.slack.com/services/...",
        )


def post_decision(url: str, text: str, record: dict[str, Any]) -> bool:
    """Post a message, with its record unless the webhook is Slack's; returns False if that failed.

    Whatever goes wrong is a note on standard error and nothing else: a webhook that is away decides nothing.
    """
    address = url.removeprefix(_SLACK)
    host = urlsplit(address).hostname or ""
    to_slack = address != url or host == "hooks.slack.com"
    body = {"text": text} if to_slack else {"text": text, **record}
    request = urllib.request.Request(  # noqa: S310 - http or https, see `check_address`
        address, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    problem = ""
    for attempt in range(_TRIES):
        if attempt:
            time.sleep(longest_pause(attempt, first=_FIRST_PAUSE, longest=_LONGEST_PAUSE))
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS):  # noqa: S310
                return True
        except urllib.error.HTTPError as error:
            problem = f"HTTP status {error.code}"
            error.close()
            if error.code < 500 and error.code not in (408, 429):
                break  # It will not want the same message a second later.
        except (OSError, ValueError) as error:
            problem = f"{type(error).__name__}: {getattr(error, 'reason', error)}"
    err().print(f"note: the webhook at {host} could not be notified: {problem}", markup=False)
    return False


def gate(
    run: options.Run,
    baseline: Annotated[
        str | None,
        typer.Option("--baseline", metavar="RUN", help="The run to compare with.", autocompletion=options.complete_run),
    ] = None,
    margin: Annotated[
        float | None,
        typer.Option("--margin", metavar="SHARE", help="How far the pass rate may be below the baseline's."),
    ] = None,
    floor: Annotated[
        list[str] | None,
        typer.Option(
            "--floor",
            metavar="METRIC=N",
            help="Minimum pass rate (passed=0.8; errors count as failures), mean of a metric, or quantile "
            "(median:words=20).",
        ),
    ] = None,
    ceiling: Annotated[
        list[str] | None,
        typer.Option(
            "--ceiling", metavar="METRIC=N", help="Maximum mean of a metric, or quantile (p95:latency_ms=2000)."
        ),
    ] = None,
    bounds: options.Bounds = None,
    rules: Annotated[
        Path | None, typer.Option("--rules", metavar="FILE", help="TOML file with a [gate] table.")
    ] = None,
    labels: options.LabelFile = None,
    labels_by_verdict: options.ByVerdict = False,
    labels_drawn: options.LabelsDrawn = False,
    label_name: Annotated[str | None, options.LABEL_NAME] = None,
    other_users: options.OtherUsers = False,
    notify: Annotated[
        str | None,
        typer.Option("--notify", metavar="URL", help="Post the decision to this webhook (Slack or any other)."),
    ] = None,
    store: options.Store = None,
    json: options.Json = False,
) -> int:
    """Decide from intervals whether a run passes: exit 0, 1 or 3.

    Exit codes: 0 if it passes, 1 if it fails, 3 if the data are inconclusive. Rules come from --rules, or else from
    [tool.fairtrial.gate] in pyproject.toml, or else from the plan of the run; options override them. If
    GITHUB_STEP_SUMMARY names a file, the decision is appended to it. --notify posts the decision to a webhook as JSON,
    or as plain text for Slack (also if the URL begins with slack+). If the webhook cannot be reached, a note is printed
    and the exit code stays the same.

    \b
    Examples:
      fairtrial gate support:careful --ceiling p95:latency_ms=2000
      fairtrial gate support:careful --baseline support:baseline --margin 0.02
      fairtrial gate support@latest --rules gate.toml --baseline support@3
    """
    from fairtrial.reports.gate.gate import gate as decide
    from fairtrial.reports.gate.gate import planned_rules

    if notify is not None:
        check_address(notify)
    opened = options.open_existing(store)
    sides = [options.one_experiment(opened, options.find_run(opened, run), run)]
    if baseline is not None:
        named = options.find_baseline(opened, baseline, sides[0].source.run)
        sides.append(options.one_experiment(opened, named, baseline))
    chosen = _rules(rules, margin, floor, ceiling, bounds, planned_rules(sides[0].source))
    if other_users:
        chosen = replace(chosen, other_users=True)
    if chosen.empty:
        raise UserError(
            "the gate has no rules",
            "give --floor passed=RATE, or --margin with --baseline, or rules in [tool.fairtrial.gate]",
        )
    if chosen.compares and baseline is None:
        other = options.other_experiment(opened, sides[0].source.run, sides[0].name)
        hint = (
            f"name one: --baseline {other}" if other else "there is no other run of this suite yet: run it again first"
        )
        raise UserError("a margin needs a baseline", hint)
    decided = decide(
        sides[0],
        chosen,
        sides[1] if baseline is not None else None,
        labels=correcting_labels(labels, sides),
        label_name=label_name,
        labels_by_verdict=labels_by_verdict,
        labels_drawn=labels_drawn,
    )
    _summarize(decided)
    options.show(decided, json=json)
    if notify is not None:
        record = {"run": run, "gate": options.record_of(decided)}
        post_decision(notify, f"fairtrial gate: {run} {_describe(decided)}", record)
    return decided.exit_code


def _rules(
    file: Path | None,
    margin: float | None,
    floors: list[str] | None,
    ceilings: list[str] | None,
    bounds: list[str] | None,
    planned: GateRules,
) -> GateRules:
    from fairtrial.cli.settings import load_settings
    from fairtrial.reports.figures.metrics import PASSED
    from fairtrial.reports.figures.rules import GateRules

    settings = load_settings()
    if file is not None:
        rules = GateRules.load(file)
    elif settings.gate and settings.root is not None:
        rules = GateRules.load(settings.root / "pyproject.toml", "tool.fairtrial.gate")
    else:
        rules = planned
    changes: dict[str, Any] = {}
    if margin is not None:
        changes["margin"] = margin
    if floors:
        changes["floors"] = {**rules.floors, **_numbers("--floor", floors)}
        if PASSED in changes["floors"]:
            changes["min_pass_rate"] = changes["floors"].pop(PASSED)
    if ceilings:
        changes["ceilings"] = {**rules.ceilings, **_numbers("--ceiling", ceilings)}
    if bounds:
        changes["bounds"] = {**rules.bounds, **options.parse_ranges("--bounds", bounds)}
    return replace(rules, **changes)


def _numbers(option: str, pairs: list[str]) -> dict[str, float]:
    numbers = dict(options.parse_pairs(option, pairs))
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(f"{option} must be METRIC=NUMBER (got {name}={value})", f"as in: {option} value=0.7")
    return numbers


def _describe(decided: Any) -> str:
    """Summarize the decision and its reasons in one line."""
    words = {"pass": "passed", "fail": "FAILED"}.get(decided.status, "could not be decided")
    return ": ".join([words, "; ".join(decided.reasons)]) if decided.reasons else words


def _summarize(decided: Any) -> None:
    """Append the decision to the CI step summary, if there is one."""
    file = os.environ.get("GITHUB_STEP_SUMMARY")
    if file:
        text: str = decided.to_markdown()
        with open(file, "a", encoding="utf-8") as page:
            page.write(text.rstrip() + "\n\n")
