"""`fairtrial gate`: may this run be let through?"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fairtrial.cli import options

if TYPE_CHECKING:
    from fairtrial.analysis.gate_rules import GateRules


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("gate")(gate)


def gate(
    run: options.Run,
    baseline: Annotated[
        str | None,
        typer.Option("--baseline", metavar="RUN", help="What it is held against.", autocompletion=options.complete_run),
    ] = None,
    margin: Annotated[
        float | None,
        typer.Option("--margin", metavar="SHARE", help="How much its pass rate may lie below the baseline's."),
    ] = None,
    min_pass_rate: Annotated[
        float | None, typer.Option("--min-pass-rate", metavar="RATE", help="The least pass rate; errors are failures.")
    ] = None,
    floor: Annotated[
        list[str] | None, typer.Option("--floor", metavar="METRIC=N", help="The least mean of a metric.")
    ] = None,
    ceiling: Annotated[
        list[str] | None, typer.Option("--ceiling", metavar="METRIC=N", help="The greatest mean, as latency_ms=2000.")
    ] = None,
    rules: Annotated[
        Path | None, typer.Option("--rules", metavar="FILE", help="A TOML file with a table [gate].")
    ] = None,
    store: options.Store = None,
    json: options.Json = False,
) -> int:
    """Decide whether a run passes, by intervals: exit 0, 1 or 3.

    0 if it passes, 1 if it does not, 3 if the data cannot tell. Rules come from --rules, or else from
    [tool.fairtrial.gate] in pyproject.toml; options come on top. Where GITHUB_STEP_SUMMARY names a file, the decision
    is added to it.

    \b
    Examples:
      fairtrial gate support:careful --min-pass-rate 0.8
      fairtrial gate support:careful --baseline support:baseline --margin 0.02
      fairtrial gate support@latest --rules gate.toml --baseline support@3
    """
    from fairtrial.cli.faults import Mistake
    from fairtrial.cli.names import find_run, name_of
    from fairtrial.cli.reporting import record_of
    from fairtrial.cli.screen import out, print_json
    from fairtrial.report import EvalReport
    from fairtrial.report.gate import gate as decide

    opened = options.open_existing(store)
    chosen = _rules(rules, margin, min_pass_rate, floor, ceiling)
    sides = []
    for text in (run, baseline):
        if text is None:
            continue
        named = find_run(opened, text)
        if len(named.experiments) > 1:
            known = " or ".join(f"{name_of(named.run)}:{name}" for name in named.experiments)
            raise Mistake(f"{text} has {len(named.experiments)} experiments", f"say which is meant: {known}")
        sides.append(EvalReport(opened, named.run)[named.experiments[0]])
    if chosen.empty:
        raise Mistake(
            "the gate has no rules",
            "give --min-pass-rate, or --margin with --baseline, or rules in [tool.fairtrial.gate]",
        )
    if chosen.compares and baseline is None:
        raise Mistake("a margin compares with a baseline, and none is named", "name one: --baseline support@3")
    decided = decide(sides[0], chosen, sides[1] if baseline is not None else None)
    _summarize(decided)
    if json:
        print_json(record_of(decided))
    else:
        out().print(decided)
    return decided.exit_code


def _rules(
    file: Path | None,
    margin: float | None,
    min_pass_rate: float | None,
    floors: list[str] | None,
    ceilings: list[str] | None,
) -> GateRules:
    from dataclasses import replace

    from fairtrial.analysis.gate_rules import GateRules
    from fairtrial.cli.settings import load_settings

    settings = load_settings()
    if file is not None:
        found = GateRules.load(file)
    elif settings.gate and settings.root is not None:
        found = GateRules.load(settings.root / "pyproject.toml", "tool.fairtrial.gate")
    else:
        found = GateRules()
    changes: dict[str, Any] = {}
    if margin is not None:
        changes["margin"] = margin
    if min_pass_rate is not None:
        changes["min_pass_rate"] = min_pass_rate
    if floors:
        changes["floors"] = {**found.floors, **_numbers("--floor", floors)}
    if ceilings:
        changes["ceilings"] = {**found.ceilings, **_numbers("--ceiling", ceilings)}
    return replace(found, **changes)


def _numbers(option: str, pairs: list[str]) -> dict[str, float]:
    from fairtrial.cli.faults import Mistake
    from fairtrial.cli.pairs import parse_pairs

    found = dict(parse_pairs(option, pairs))
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise Mistake(f"{option} takes METRIC=NUMBER, not {name}={value}", f"as in: {option} value=0.7")
    return found


def _summarize(decided: Any) -> None:
    """Add the decision to the page that CI shows beside a change, where there is one."""
    file = os.environ.get("GITHUB_STEP_SUMMARY")
    if file:
        text: str = decided.to_markdown()
        with open(file, "a", encoding="utf-8") as page:
            page.write(text.rstrip() + "\n\n")
