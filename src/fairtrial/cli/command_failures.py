"""`fairtrial failures`: what went wrong in a run, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from fairtrial.cli import options

if TYPE_CHECKING:
    from fairtrial.trials.result import EvalResult


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("failures")(failures)


def failures(
    run: options.Run,
    kind: Annotated[
        str | None,
        typer.Option("--kind", metavar="KIND", help="failed, task_error, scorer_error, timeout or dead_letter."),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, help="How many trials to list.")] = 50,
    store: options.Store = None,
    json: options.Json = False,
) -> int:
    """List the trials that did not pass, and why: errors first.

    \b
    Examples:
      fairtrial failures support
      fairtrial failures support:terse --kind timeout
      fairtrial failures support --json
    """
    from itertools import chain, islice

    from fairtrial.cli.facts import trial_facts
    from fairtrial.cli.names import find_run, name_of
    from fairtrial.cli.screen import commands, note, out, print_json, print_table

    opened = options.open_existing(store)
    named = find_run(opened, run)
    wanted = _kinds(kind)
    errors = [name for name in wanted if name != "failed"]
    where: dict[str, Any] = {"experiment": named.experiment}
    found: list[EvalResult] = list(
        islice(
            chain(
                opened.results(named.run.run_id, outcomes=errors, **where) if errors else (),
                opened.results(named.run.run_id, passed=False, **where) if "failed" in wanted else (),
            ),
            limit + 1,
        )
    )
    more, found = len(found) > limit, found[:limit]
    if json:
        facts = [trial_facts(result) for result in found]
        print_json({"format": "fairtrial.failures/1", "run_id": named.run.run_id, "truncated": more, "trials": facts})
        return 0
    if not found:
        note(f"nothing of that kind in {named}" if kind else f"every trial of {named} passed")
        return 0
    console = out()
    print_table(console, _table(named.run, found))
    if more:
        console.print(f"more than {limit}: see the others with --limit")
    first = found[0]
    console.print()
    commands(
        console,
        "next",
        [(f"fairtrial show {_quoted(f'{name_of(named.run)}:{first.experiment}')} --sample {_quoted(first.sample_id)}",
          "one trial, whole")],
    )  # fmt: skip
    return 0


def _quoted(text: str) -> str:
    import shlex

    from fairtrial.render.safe_text import plain

    return shlex.quote(plain(text))


def _kinds(kind: str | None) -> tuple[Any, ...]:
    import difflib

    from fairtrial.cli.faults import Mistake

    known = ("task_error", "timeout", "scorer_error", "dead_letter", "failed")
    if kind is None:
        return known
    plain_kind = kind.replace(" ", "_").replace("-", "_")
    if plain_kind in known:
        return (plain_kind,)
    near = difflib.get_close_matches(plain_kind, known, 1)
    raise Mistake(f"no trial ends as {kind!r}", f"did you mean {near[0]}?" if near else f"one of {', '.join(known)}")


def _table(run: Any, found: list[EvalResult]) -> Any:
    from fairtrial.cli.screen import add_row, make_table

    several = len(run.experiments) > 1
    columns = ["sample", *(["experiment"] if several else []), *(["repeat"] if run.repeats > 1 else [])]
    table = make_table(*columns, "what", "why", right=("repeat",), cut=("sample", "experiment", "why"))
    for result in found:
        what = "failed" if result.outcome == "scored" else result.outcome.replace("_", " ")
        cells = [result.sample_id]
        if several:
            cells.append(result.experiment)
        if run.repeats > 1:
            cells.append(str(result.repeat))
        add_row(table, *cells, what, why(result))
    return table


def why(result: EvalResult) -> str:
    """One line on why a trial did not pass: its error, or the reason for its score, which names failed criteria."""
    from fairtrial.cli.trial import value_text

    if result.score is None:
        return (result.error or "").removeprefix("fairtrial.errors.")
    failed = result.score.failed_criteria
    names = ", ".join(metric.name for metric in failed)
    reasons = [metric.reason for metric in failed if metric.reason]
    if len(failed) > 1 and reasons:  # All names first: the end of a long line is cut.
        return f"{names}: {'; '.join(reasons)}"
    unexplained = "; ".join(f"{metric.name}: failed with {metric.value:g}" for metric in failed)
    if result.score.reason in ("", unexplained):  # Nobody said why: the answer may show it.
        return f"{names}: got {value_text(result.output)}" if failed else f"got {value_text(result.output)}"
    return result.score.reason
