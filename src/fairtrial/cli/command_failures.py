"""`fairtrial failures`: the trials that did not pass, with reasons."""

from __future__ import annotations

import difflib
import shlex
from itertools import chain, islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fairtrial.cli import options
from fairtrial.cli.user_errors import UserError

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
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, help="Number of trials to list.")] = 50,
    store: options.Store = None,
    json: options.Json = False,
) -> int:
    """List the trials that did not pass, with reasons.

    \b
    Examples:
      fairtrial failures support
      fairtrial failures support:terse --kind timeout
      fairtrial failures support --json
    """
    from fairtrial.cli.options import find_run
    from fairtrial.cli.screen import commands, note, out, print_json, print_table
    from fairtrial.reports.report.trials import trial_record
    from fairtrial.reports.run_names import name_of

    opened = options.open_existing(store)
    named = find_run(opened, run)
    wanted = _kinds(kind)
    errors = [name for name in wanted if name != "failed"]
    where: dict[str, Any] = {"experiment": named.experiment}
    trials: list[EvalResult] = list(
        islice(
            chain(
                opened.results(named.run.run_id, outcomes=errors, **where) if errors else (),
                opened.results(named.run.run_id, passed=False, **where) if "failed" in wanted else (),
            ),
            limit + 1,
        )
    )
    more, trials = len(trials) > limit, trials[:limit]
    if json:
        facts = [trial_record(result) for result in trials]
        print_json({"format": "fairtrial.failures/1", "run_id": named.run.run_id, "truncated": more, "trials": facts})
        return 0
    if not trials:
        note(f"no trial of that kind in {named}" if kind else f"every trial of {named} passed")
        return 0
    console = out()
    print_table(console, _table(named.run, trials))
    if more:
        console.print(f"only the first {limit} are listed; use --limit to see more")
    first = trials[0]
    console.print()
    commands(
        console,
        "next",
        [(f"fairtrial show {_quoted(f'{name_of(named.run)}:{first.experiment}')} --sample {_quoted(first.sample_id)}",
          "one trial in full")],
    )  # fmt: skip
    return 0


def _quoted(text: str) -> str:
    from fairtrial.reports.render.safe_text import plain

    return shlex.quote(plain(text))


def _kinds(kind: str | None) -> tuple[Any, ...]:
    kinds = ("task_error", "timeout", "scorer_error", "dead_letter", "failed")
    if kind is None:
        return kinds
    plain_kind = kind.replace(" ", "_").replace("-", "_")
    if plain_kind in kinds:
        return (plain_kind,)
    near = difflib.get_close_matches(plain_kind, kinds, 1)
    raise UserError(f"unknown kind {kind!r}", f"did you mean {near[0]}?" if near else f"one of {', '.join(kinds)}")


def _table(run: Any, trials: list[EvalResult]) -> Any:
    from fairtrial.cli.screen import add_row, make_table
    from fairtrial.reports.render.safe_text import input_start, is_hash
    from fairtrial.reports.report.trials import sample_of

    several = len(run.experiments) > 1
    hashed = all(is_hash(result.sample_id) for result in trials)
    columns = ["sample", *(["input"] if hashed else [])]
    columns += [*(["experiment"] if several else []), *(["repeat"] if run.repeats > 1 else [])]
    table = make_table(*columns, "what", "why", right=("repeat",), cut=("sample", "experiment"),
                       prose=("input", "why"))  # fmt: skip
    for result in trials:
        what = "failed" if result.outcome == "scored" else result.outcome.replace("_", " ")
        cells = [result.sample_id]
        if hashed:
            cells.append(input_start(sample_of(result).input))
        if several:
            cells.append(result.experiment)
        if run.repeats > 1:
            cells.append(str(result.repeat))
        add_row(table, *cells, what, why(result))
    return table


def why(result: EvalResult) -> str:
    """Return in one line why a trial did not pass: its error, or the reason of its score with the failed criteria."""
    from fairtrial.reports.render.safe_text import value_text

    if result.score is None:
        from fairtrial.reports.figures.error_groups import error_location

        location = error_location(result).partition(" in ")[0]  # First: the end of a long line is cut.
        error = (result.error or "").removeprefix("fairtrial.errors.")
        return f"{location}: {error}" if location else error
    failed = result.score.failed_criteria
    names = ", ".join(metric.name for metric in failed)
    reasons = [metric.reason for metric in failed if metric.reason]
    if len(failed) > 1 and reasons:  # All names first: the end of a long line is cut.
        return f"{names}: {'; '.join(reasons)}"
    unexplained = "; ".join(f"{metric.name}: failed with {metric.value:g}" for metric in failed)
    if result.score.reason in ("", unexplained):  # No reason is given: show the output instead.
        return f"{names}: got {value_text(result.output)}" if failed else f"got {value_text(result.output)}"
    return result.score.reason
