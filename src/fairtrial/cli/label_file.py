"""Labels from files, one row each."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairtrial.base.codec import parse_foreign_json
from fairtrial.cli.user_errors import UserError

if TYPE_CHECKING:
    from fairtrial.reports import ExperimentReport
    from fairtrial.reports.figures.labels import Labels
    from fairtrial.reports.figures.metrics import ExperimentSource
    from fairtrial.store.protocol import Label

STORE = "store"


def correcting_labels(option: str | None, sides: Sequence[ExperimentReport]) -> Labels | bool:
    """Return the labels for a comparison or a gate: from a file, or True for those in the store."""
    if option is None:
        return False
    return True if option == STORE else read_labels(Path(option), sides)


def read_labels(file: Path, sides: Sequence[ExperimentReport]) -> list[Label]:
    """Read the labels in a file that belong to one of these experiments.

    A row has id and label; where it is not clear which experiment it is about, experiment, run or both. It may have
    repeat, weight, annotator, and the name of the review that drew the trial.
    """
    from fairtrial.cli.options import parse_value
    from fairtrial.errors import ConfigurationError
    from fairtrial.reports.report import source_of
    from fairtrial.store.protocol import Label
    from fairtrial.trials.context import TrialKey

    sources = [source_of(side, "name one") for side in sides]
    labels = []
    for number, row in _rows(file):
        fields = row if isinstance(row, dict) else {}
        sample = fields.get("id") or fields.get("sample_id")
        value = fields.get("label", fields.get("value"))
        if sample is None or value is None:
            has = ", ".join(map(str, fields)) or "neither"
            raise UserError(f"{file}:{number}: a label needs id and label", f"this row has {has}")
        source = _source(sources, fields, f"{file}:{number}")
        if source is None:
            continue
        repeat = fields.get("repeat")
        if repeat in (None, "") and source.run.repeats > 1:
            raise UserError(
                f"{file}:{number}: run {source.run.run_id} has {source.run.repeats} repeats of each sample",
                "add a column `repeat` with the number of the repeat, from 0",
            )
        try:
            key = TrialKey(source.run.run_id, source.name, str(sample), int(repeat or 0))
            weight = float(fields.get("weight") or 1.0)
            parsed = parse_value(value.lower()) if isinstance(value, str) else value
            review = str(fields.get("review") or "")
            labels.append(Label(key, review, parsed, str(fields.get("annotator") or ""), weight=weight))
        except (ValueError, TypeError, OverflowError, ConfigurationError) as error:
            raise UserError(
                f"{file}:{number}: repeat must be a whole number and weight a number above 0: {error}"
            ) from None
    return labels


def _source(sources: Sequence[ExperimentSource], fields: dict[str, Any], where: str) -> ExperimentSource | None:
    """Return the experiment that a row belongs to; None if it is not one of these."""
    experiment, run = fields.get("experiment"), fields.get("run")
    about = [
        source
        for source in sources
        if experiment in (None, "", source.name)
        and (run in (None, "") or str(run) in (source.run.run_id, source.run.name))
    ]
    if len({(source.run.run_id, source.name) for source in about}) > 1:
        raise UserError(
            f"{where}: the row does not tell which experiment the label belongs to",
            f"add a column experiment, or run (such as {about[0].run.name}), or both",
        )
    return about[0] if about else None


def _rows(file: Path) -> Iterator[tuple[int, Any]]:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"the labels in {file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{file} must be UTF-8: {error.reason} at byte {error.start}") from None
    if file.suffix == ".csv":
        reader = csv.DictReader(io.StringIO(text, newline=""))
        try:
            for row in reader:
                yield reader.line_num, row
        except csv.Error as error:
            raise UserError(f"{file}:{reader.line_num}: not CSV: {error}") from None
    elif file.suffix in (".jsonl", ".ndjson"):
        for number, line in enumerate(
            text.split("\n"), 1
        ):  # `splitlines` would also split at separators that are allowed inside JSON strings.
            if line.strip():
                try:
                    yield number, parse_foreign_json(line.encode())
                except ValueError as error:
                    raise UserError(f"{file}:{number}: not JSON: {error}") from None
    else:
        raise UserError(f"labels must be in a .csv or .jsonl file (got {file.name})")
