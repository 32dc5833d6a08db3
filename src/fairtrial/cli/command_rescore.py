"""`fairtrial rescore`: score stored outputs again."""

from __future__ import annotations

from typing import Annotated

import typer

from fairtrial.cli import options
from fairtrial.cli.user_errors import ExitCode, UserError


def rescore(
    run: options.Run,
    suite: Annotated[str, typer.Argument(metavar="SUITE", help="Suite with the evaluator to use: file.py[:name].")],
    max_cost: options.MaxCost = None,
    resume: Annotated[
        str, typer.Option("--resume", metavar="auto|never", help="never: start a new run even if one is unfinished.")
    ] = "auto",
    store: options.Store = None,
    json: options.Json = False,
) -> int:
    """Score the stored outputs of a run again; no task is called.

    Uses the current evaluator of the suite. The scores become a new run, so that you can compare both. After an
    interruption or failed scoring, run the same command again to score what is missing. The suite must have the
    samples and experiments of the run. Outputs in which secrets were redacted are not scored.

    \b
    Examples:
      fairtrial rescore support@3 evals.py
      fairtrial rescore 5f2c19 evals.py:strict --json
    """
    from fairtrial.base.formatting import count
    from fairtrial.cli.adhoc import load
    from fairtrial.cli.running import Selection, selected
    from fairtrial.cli.screen import note
    from fairtrial.errors import RunMismatchError
    from fairtrial.reports.run_names import RunName, name_of
    from fairtrial.store.notes import write_notes

    options.start_logging()
    opened = options.open_existing(store)
    named = options.find_run(opened, run)
    settings, _ = options.settings_with(store)
    with settings.prices():
        loaded = selected(load(suite), Selection(max_cost=max_cost, strict_cost=settings["strict-cost"]))
        try:
            report = loaded.rescore_sync(named.run.run_id, store=opened, resume=resume)
        except RunMismatchError as error:
            what, _, remedy = str(error).rpartition(". ")
            raise UserError(what, f"{remedy[:1].lower()}{remedy[1:]}") from None
        except KeyboardInterrupt:
            note("interrupted: the scores so far are stored; the same command scores the rest")
            return int(ExitCode.INTERRUPTED)
    opened.update_run(report.run_id, notes=write_notes(command_line=[suite]))
    made = opened.get_run(report.run_id)
    note(f"rescored {name_of(named.run)} as {name_of(made)}; no task was called")
    redacted = made.noted.redacted
    if redacted:
        note(f"{count(redacted, 'trial')} not scored: secrets were redacted in the stored output or transcript")
    options.show_report(opened, RunName(made), json=json, next_commands=False)
    if made.status in ("unscored", "incomplete"):
        note("some outputs could not be scored; the same command scores them again")
        return int(ExitCode.ERRORED)
    return int(ExitCode.OK if made.status == "finished" else ExitCode.INCONCLUSIVE)
