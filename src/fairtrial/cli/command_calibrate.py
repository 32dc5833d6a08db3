"""`fairtrial calibrate`: a judge held against people's labels."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fairtrial.cli import options


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("calibrate")(calibrate)


def calibrate(
    run: options.Run,
    labels: Annotated[
        Path | None,
        typer.Option("--labels", metavar="FILE", help="A .csv or .jsonl with id and label; the store's labels else."),
    ] = None,
    metric: Annotated[
        str, typer.Option("--metric", metavar="NAME", help="Which of the judge's figures: passed, value or a metric.")
    ] = "passed",
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Which labels of the store, if there are several.")
    ] = None,
    level: Annotated[float, typer.Option("--level", metavar="SHARE", help="The confidence of intervals.")] = 0.95,
    store: options.Store = None,
    json: options.Json = False,
) -> int:
    """Hold a judge's scores against people's labels.

    Shows how far they agree, and the pass rate corrected by it. Labels are true or false, pass or fail, a number, or
    one of the judge's ratings, for a random sample of the trials.

    \b
    Examples:
      fairtrial calibrate support:careful --labels labels.csv
      fairtrial calibrate support:careful --metric helpful --json
    """
    from fairtrial.cli.faults import Mistake
    from fairtrial.cli.names import find_run, name_of
    from fairtrial.cli.screen import out, print_json
    from fairtrial.report import EvalReport
    from fairtrial.report.calibrate import calibrate as calibrated

    opened = options.open_existing(store)
    named = find_run(opened, run)
    if len(named.experiments) > 1:
        known = " or ".join(f"{name_of(named.run)}:{experiment}" for experiment in named.experiments)
        raise Mistake(f"{run} has {len(named.experiments)} experiments", f"say which is meant: {known}")
    part = EvalReport(opened, named.run)[named.experiments[0]]
    found = calibrated(part, None if labels is None else _read(labels), metric=metric, name=name, level=level)
    if not found.labelled:
        raise _no_labels(str(named), labels)
    if json:
        print_json(found.to_json())
        return 0
    out().print(found)
    return 0


def _no_labels(name: str, file: Path | None) -> Exception:
    from fairtrial.cli.faults import Mistake

    if file is None:
        return Mistake(
            f"no trial of {name} has a label",
            "let people judge a random sample of its trials, and name the file: --labels labels.csv, with the columns "
            "id and label (pass or fail)",
        )
    return Mistake(f"no label in {file} is for a judged trial of {name}", "the ids of samples go under id")


def _read(file: Path) -> dict[str, Any]:
    """Labels by sample id."""
    import csv
    import json as json_text

    from fairtrial.cli.faults import Mistake
    from fairtrial.cli.pairs import parse_value

    try:
        text = file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise Mistake(f"the labels in {file} cannot be read: {error.strerror}") from None
    rows: list[tuple[int, Any]]
    if file.suffix == ".csv":
        rows = [(number, row) for number, row in enumerate(csv.DictReader(text.splitlines()), 2)]
    elif file.suffix in (".jsonl", ".ndjson"):
        rows = []
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                try:
                    rows.append((number, json_text.loads(line)))
                except ValueError as error:
                    raise Mistake(f"{file}:{number}: not JSON: {error}") from None
    else:
        raise Mistake(f"labels are read from .csv and .jsonl files, not from {file.name}")
    found: dict[str, Any] = {}
    for number, row in rows:
        fields = row if isinstance(row, dict) else {}
        key = fields.get("id") or fields.get("sample_id")
        value = fields.get("label", fields.get("value"))
        if key is None or value is None:
            has = ", ".join(map(str, fields)) or "neither"
            raise Mistake(f"{file}:{number}: a label needs id and label", f"this row has {has}")
        found[str(key)] = parse_value(value.lower()) if isinstance(value, str) else value
    return found
