"""`fairtrial calibrate`: compare a judge with people's labels."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fairtrial.cli import options
from fairtrial.cli.user_errors import UserError


def calibrate(
    run: options.Run,
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
    store: options.Store = None,
    json: options.Json = False,
) -> int:
    """Compare a judge's scores with people's labels.

    Shows how often they agree, and the pass rate corrected with the labels. A label is true or false, pass or fail,
    a number, or one of the judge's ratings. The labelled trials must be a random sample of all trials, or of the
    trials with each verdict. If some trials were more likely to be labelled, the column `weight` holds how many
    trials a label represents.

    \b
    Examples:
      fairtrial calibrate support:careful --labels labels.csv
      fairtrial calibrate support:careful --metric helpful --json
    """
    from fairtrial.cli.label_file import read_labels
    from fairtrial.reports.calibrate.calibrate import calibrate as calibrated

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


def _no_labels(name: str, file: Path | None) -> Exception:
    if file is None:
        return UserError(
            f"no trial of {name} has a label",
            "label a random sample of its trials and pass the file: --labels labels.csv, with the columns "
            "id and label (pass or fail)",
        )
    return UserError(f"no label in {file} is for a judged trial of {name}", "the ids of samples go under id")
