"""`fairtrial calibrate`: compare a judge with people's labels."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated

import typer

from fairtrial.cli import options
from fairtrial.cli.user_errors import UserError


def calibrate(
    run: Annotated[str | None, options.RUN] = None,
    labels: Annotated[
        Path | None,
        typer.Option(
            "--labels", metavar="FILE", help="A .csv or .jsonl file with id and label (default: labels in the store)."
        ),
    ] = None,
    metric: Annotated[
        str,
        typer.Option(
            "--metric", metavar="NAME", help="The judge's metric to check: passed, value, or a metric's name."
        ),
    ] = "passed",
    name: Annotated[str | None, options.LABEL_NAME] = None,
    by_verdict: options.ByVerdict = False,
    drawn: options.LabelsDrawn = False,
    level: Annotated[float, typer.Option("--level", metavar="SHARE", help="Confidence level of intervals.")] = 0.95,
    golden: Annotated[
        str | None,
        typer.Option("--golden", metavar="NAME", help="Measure a metric on its golden set instead; `list` shows them."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="MODEL", help="The judge of --golden: PROVIDER:NAME, or file.py:adapter."),
    ] = None,
    store: options.Store = None,
    json: options.Json = False,
) -> int:
    """Compare a judge's scores with people's labels.

    Shows how often they agree, and the pass rate corrected with the labels. A label is true or false, pass or fail,
    a number, or one of the judge's ratings. The labelled trials must be a random sample of all trials, or of the
    trials with each verdict. If some trials were more likely to be labelled, the column `weight` holds how many
    trials a label represents.

    With --golden NAME, a metric of that name is measured on labelled cases that come with Fairtrial: a rule at once, a
    judge with the model that you name.

    \b
    Examples:
      fairtrial calibrate support:careful --labels labels.csv
      fairtrial calibrate support:careful --metric helpful --json
      fairtrial calibrate --golden list
      fairtrial calibrate --golden toxicity --model openai:gpt-6.1-sol
    """
    from fairtrial.cli.label_file import read_labels
    from fairtrial.reports.calibrate.calibrate import calibrate as calibrated

    if golden is not None:
        if run is not None or labels is not None:
            raise UserError("--golden takes neither a run nor labels", "it has cases and labels of its own")
        return _golden(golden, model, level, json=json)
    if model is not None:
        raise UserError("--model is the judge of a golden set", "name the set: --golden list shows them")
    if run is None:
        raise UserError("name a run, or a golden set", "as in: fairtrial calibrate support:careful, or --golden list")
    opened = options.open_existing(store)
    named = options.find_run(opened, run)
    part = options.one_experiment(opened, named, run)
    file_labels = None if labels is None else read_labels(labels, [part])
    calibration = calibrated(
        part, file_labels, metric=metric, name=name, level=level, by_verdict=by_verdict, drawn=drawn
    )
    if not calibration.labelled:
        raise _no_labels(str(named), labels)
    return options.show(calibration, json=json)


def _golden(name: str, model: str | None, level: float, *, json: bool) -> int:
    """Measure a metric on its golden set."""
    from fairtrial import scoring
    from fairtrial.cli.adhoc import adapter_of
    from fairtrial.cli.screen import ScreenTable, out, print_json, print_table
    from fairtrial.cli.user_errors import ExitCode
    from fairtrial.models import judges
    from fairtrial.reports.calibrate.golden import golden_check
    from fairtrial.reports.render.document import Column
    from fairtrial.suites import EvalSuite

    rules, known = scoring.GOLDEN_RULES, scoring.GOLDEN_SETS
    if name == "list":
        rows = [{"name": each, "kind": "rule" if each in rules else "judge", "limit": known[each]} for each in known]
        if json:
            print_json({"format": "fairtrial.golden_sets/1", "golden_sets": rows})
        else:
            limit = Column("limit", "left", name=True, prose=True, heading=False, lines=4)
            columns = (Column("metric", "left", name=True, shortest=18), Column("kind", "left"), limit)
            print_table(out(), ScreenTable(columns, [tuple(row.values()) for row in rows]))
        return ExitCode.OK
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        meant = f"did you mean {near[0]}?" if near else "fairtrial calibrate --golden list shows them"
        raise UserError(f"there is no golden set {name!r}", meant)
    if name in rules:
        if model is not None:
            raise UserError(f"{name} is a rule, which asks no model", "leave out --model")
        metric = getattr(scoring, name)()
    elif model is None:
        command = f"fairtrial calibrate --golden {name} --model PROVIDER:NAME"
        raise UserError(f"{name} is a judge, which needs a model", f"as in: {command}")
    else:
        metric = getattr(judges, name)(adapter_of(model))
    suite = EvalSuite(f"golden-{name}", scoring.golden_set(name), scoring.replay, metric)
    check = golden_check(name, suite.run_sync(store="memory:", progress=model is not None and not json), level=level)
    options.show(check, json=json)
    return ExitCode.ERRORED if check.unscored else ExitCode.OK


def _no_labels(name: str, file: Path | None) -> Exception:
    if file is None:
        return UserError(
            f"no trial of {name} has a label",
            "label a random sample of its trials and pass the file: --labels labels.csv, with the columns "
            "id and label (pass or fail)",
        )
    return UserError(f"no label in {file} is for a judged trial of {name}", "the ids of samples go under id")
