"""`fairtrial import`: import runs, datasets and graders from other tools."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fairtrial.base.codec import parse_foreign_json
from fairtrial.base.plugins import plugin_names
from fairtrial.cli import options
from fairtrial.cli.user_errors import UserError
from fairtrial.errors import CodecError

if TYPE_CHECKING:
    from fairtrial.reports.bundle import BundleCheck
    from fairtrial.runs.imported import Import, ImportedSuite, StoredRun
    from fairtrial.store.protocol import RunStore

_SHOWN_DIFFERENCES = 10


def import_(
    sources: Annotated[list[Path], typer.Argument(metavar="SOURCE", help="Folders or files saved by the other tool.")],
    format: Annotated[
        str,
        typer.Option(
            "--format",
            "-f",
            metavar="FORMAT",
            help="A format that `fairtrial doctor` lists, or auto: recognized from the files.",
        ),
    ] = "auto",
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Folder for datasets and suites.")
    ] = Path("imported"),
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Recompute the figures of a bundle (export --format bundle); store nothing."),
    ] = False,
    store: options.Store = None,
    json: options.Json = False,
) -> int:
    """Import runs, datasets and graders from another tool.

    Imported runs are like other runs, except that they cannot be resumed. Datasets become JSONL files. Graders that
    have an equivalent become a suite file. Importing the same runs again adds nothing, and files that you changed
    are kept.

    A bundle of `fairtrial export --format bundle` is verified first: its figures are recomputed from its trials. It is
    stored only if they are as published. Nothing in it is executed.

    \b
    Examples:
      fairtrial import logs/*.eval                          Inspect
      fairtrial import results.json --format promptfoo
      fairtrial import samples_gsm8k_2026-11-16.jsonl    lm-evaluation-harness
      fairtrial import openai-evals --format openai-evals
      fairtrial import openai-evals --output evals --json
      fairtrial import traces.jsonl           OpenTelemetry traces (OTLP)
      fairtrial import support-1.bundle.zip --verify
      fairtrial runs --tag origin=openai-evals
    """
    if verify or any(is_bundle(source) for source in sources):
        return _import_bundle(sources, verify, store, json)
    from fairtrial.cli.screen import print_json
    from fairtrial.runs.imported import load_importer, merge_suites, store_run, write_suite

    chosen, *others = dict.fromkeys(_format_of(source, format) for source in sources)
    if others:
        raise UserError(
            f"the sources have several formats: {', '.join((chosen, *others))}", "import each format on its own"
        )
    importer = load_importer(chosen)
    imported = merge_suites([importer.read(source) for source in sources])
    opened = options.open_named(options.settings_with(store)[1])
    stored = {
        suite.source_id: [store_run(opened, suite, run, chosen) for run in suite.runs] for suite in imported.suites
    }
    written = {suite.source_id: write_suite(suite, output) for suite in imported.suites if len(suite.dataset)}
    if json:
        print_json(_facts(opened, chosen, imported, stored, written))
    else:
        _show(opened, sources, imported, stored, written)
    return 0


def is_bundle(path: Path) -> bool:
    """Return whether a file begins as bundles do: a zip file, its manifest first."""
    try:
        with path.open("rb") as file:
            head = file.read(64)
    except OSError:
        return False
    return head.startswith(b"PK\x03\x04") and b"manifest.json" in head


def _import_bundle(sources: list[Path], only_verify: bool, store: str | None, json: bool) -> int:
    from fairtrial.cli.screen import print_json
    from fairtrial.cli.user_errors import ExitCode
    from fairtrial.reports.bundle import open_bundle
    from fairtrial.runs.imported import store_copy

    if len(sources) > 1:
        raise UserError("bundles are verified one at a time", "name one file")
    if not sources[0].is_file():
        raise UserError(f"{sources[0]} must be a file that `fairtrial export --format bundle` wrote", "name the file")
    with open_bundle(sources[0]) as (check, report):
        state = None
        if check.matches and not only_verify:
            opened = options.open_named(options.settings_with(store)[1])
            state = store_copy(opened, report.store, report.run, check.sha256).state
    if json:
        print_json({**check.to_json(), "state": state})
    else:
        _show_check(check, state)
    return ExitCode.OK if check.matches else ExitCode.FAILED


def _show_check(check: BundleCheck, state: str | None) -> None:
    from fairtrial._version import __version__
    from fairtrial.base.formatting import count
    from fairtrial.cli.screen import commands, out, sentence
    from fairtrial.reports.bundle import missing

    console, run, differing = out(), check.run, check.differences
    published = [one.name.startswith("figures.json") for one in differing if one.published is not missing]
    samples = {
        None: "left out of the bundle, or the run did not reach all of them",
        True: f"{run.dataset_size:,} of {run.dataset_size:,} have the fingerprint of dataset {run.dataset_name}",
        False: f"they do not have the fingerprint of dataset {run.dataset_name}",
    }[check.samples_match]
    sentence(console, f"{run.name}  bundle of run {run.run_id}, written by Fairtrial {check.made_by}")
    sentence(console, "parts       have the SHA-256 that the manifest names")
    sentence(console, f"samples     {samples}")
    same = check.figures - sum(published)
    sentence(console, f"figures     {same:,} of {check.figures:,} recomputed from {count(check.trials, 'trial')} match")
    same = check.provenance - published.count(False)
    sentence(console, f"provenance  {same:,} of {check.provenance:,} match the record of the run")
    if check.unpublished and check.made_by != __version__:
        values = count(check.unpublished, "value")
        sentence(console, f"not in it   {values} that Fairtrial {__version__} computes")
    sentence(console, f"SHA-256     {check.sha256}")
    console.print()
    for one in differing[:_SHOWN_DIFFERENCES]:
        sentence(console, f"  {one}")
    if len(differing) > _SHOWN_DIFFERENCES:
        sentence(console, f"  and {len(differing) - _SHOWN_DIFFERENCES:,} more: --json has all")
    if not check.matches:
        console.print()
        sentence(console, "The bundle does not have the figures of its trials. Nothing was stored.")
        if check.made_by != __version__:
            sentence(console, f"This is Fairtrial {__version__}, which may compute some figures in another way.")
        return
    sentence(console, "Everything matches. Compare the SHA-256 with the one that was published.")
    if state is not None:
        console.print()
        where = "stored" if state == "imported" else "this store has it already"
        commands(console, "next", [(f"fairtrial show {run.run_id}", f"{where}; the report")])


def _format_of(source: Path, format: str) -> str:
    from fairtrial.runs.imported import detect_format

    if not source.exists():
        raise UserError(f"{source} must be a folder or file that another tool saved", "name where it was saved")
    chosen = detect_format(source) if format == "auto" else format
    if chosen is None:
        damage = _damage(source)
        if damage:
            raise UserError(f"{source} {damage}", "was it copied completely?")
        raise UserError(
            f"the format of {source} is not recognized", f"--format takes {', '.join(plugin_names('importers'))}"
        )
    return chosen


def _damage(source: Path) -> str:
    """Return what is wrong with a file of no known format, whichever format it should have."""
    if not source.is_file():
        return ""
    if source.stat().st_size == 0:
        return "is empty"
    if source.suffix == ".json":
        try:
            parse_foreign_json(source.read_bytes())
        except CodecError as error:
            return f"is not JSON: {error.problem.removeprefix('not JSON: ')}"
    return ""


type Stored = dict[str, list[StoredRun]]
type Written = dict[str, list[tuple[Path, Any]]]


def _facts(store: RunStore, format: str, imported: Import, stored: Stored, written: Written) -> dict[str, Any]:
    from fairtrial.reports.report.run_json import listed_run

    suites = [
        {
            "suite": suite.name,
            "source": suite.source_id,
            "title": suite.title,
            "samples": len(suite.dataset),
            "runs": [
                {"state": one.state, "remarks": list(run.remarks),
                 **listed_run(one.run, store.totals(one.run.run_id))}
                for run, one in zip(suite.runs, stored[suite.source_id], strict=True)
            ],
            "graders": [
                {"name": one.name, "type": one.kind, "evaluator": one.evaluator, "remark": one.remark}
                for one in suite.graders
            ],
            "files": [{"file": str(path), "state": state} for path, state in written.get(suite.source_id, ())],
        }
        for suite in imported.suites
    ]  # fmt: skip
    return {"format": "fairtrial.import/1", "from": format, "suites": suites, "left_out": list(imported.left_out)}


def _show(store: RunStore, sources: list[Path], imported: Import, stored: Stored, written: Written) -> None:
    from rich.text import Text

    from fairtrial.base.formatting import count
    from fairtrial.cli.screen import commands, out, sentence

    console = out()
    every = [stored_run for runs in stored.values() for stored_run in runs]
    new = sum(stored_run.state == "imported" for stored_run in every)
    before = len(every) - new
    earlier = f"; {count(before, 'run')} had been imported before" if before else ""
    where = str(sources[0]) if len(sources) == 1 else count(len(sources), "source")
    sentence(console, f"imported {count(new, 'run')} of {count(len(imported.suites), 'eval')} from {where}{earlier}")
    if every:
        console.print()
        _show_runs(store, imported, stored)
    if any(suite.graders for suite in imported.suites):
        console.print()
        _show_graders(imported)
    if written:
        console.print()
        console.print(Text("files", style="bold"))
        for suite in imported.suites:
            for path, state in written.get(suite.source_id, ()):
                sentence(console, f"  {path}, {_file_words(suite, path, state)}")
    remarks = [*_grader_remarks(imported), *_remarks(imported, stored), *imported.left_out]
    if remarks:
        console.print()
        console.print(Text("note", style="bold"))
        for remark in remarks:
            sentence(console, f"  {remark}")
    if every:
        console.print()
        commands(console, "next", _follow_ups(imported, stored, written))


def _show_runs(store: RunStore, imported: Import, stored: Stored) -> None:
    from fairtrial.cli.command_runs import pass_rates, short_name
    from fairtrial.cli.screen import add_row, make_table, out, print_table

    table = make_table(
        "run", "experiment", "trials", "errors", "passed", "source", right=("trials", "errors", "passed"),
        cut=("experiment", "source"),
    )  # fmt: skip
    for suite in imported.suites:
        for run, stored_run in zip(suite.runs, stored[suite.source_id], strict=True):
            totals = store.totals(stored_run.run.run_id)
            outcomes: dict[Any, int] = {}
            for part in totals:
                for name, number in part.outcomes.items():
                    outcomes[name] = outcomes.get(name, 0) + number
            trials = sum(outcomes.values())
            shown = f"{trials:,}" if trials == stored_run.run.planned else f"{trials:,}/{stored_run.run.planned:,}"
            errors = trials - outcomes.get("scored", 0) - outcomes.get("not_run", 0)
            add_row(
                table, short_name(stored_run.run), ", ".join(stored_run.run.experiments), shown, f"{errors:,}",
                pass_rates(totals),
                f"{run.name} ({run.source_id})" if run.name != run.source_id else run.source_id,
            )  # fmt: skip
    print_table(out(), table)


def _show_graders(imported: Import) -> None:
    from fairtrial.cli.screen import add_row, make_table, out, print_table

    table = make_table("grader", "type", "evaluator", "suite", cut=("grader", "suite"))
    for suite in imported.suites:
        for grader in suite.graders:
            add_row(table, grader.name, grader.kind, grader.evaluator or "none", suite.name)
    print_table(out(), table)


def _file_words(suite: ImportedSuite, path: Path, state: str) -> str:
    from fairtrial.base.formatting import count

    if path.suffix == ".jsonl":
        what = count(len(suite.dataset), "sample")
    else:
        made = sum(grader.evaluator is not None for grader in suite.graders)
        what = f"a suite with {made} of {count(len(suite.graders), 'grader')}"
    if state == "kept":
        return "kept: a different file exists; use --output for another folder"
    return f"{what}{', as it was' if state == 'unchanged' else ''}"


def _grader_remarks(imported: Import) -> list[str]:
    return [
        f"grader {grader.name!r} of {suite.name}{'' if grader.evaluator else ' was not translated'}: {grader.remark}"
        for suite in imported.suites
        for grader in suite.graders
        if grader.remark
    ]


def _remarks(imported: Import, stored: Stored) -> list[str]:
    from fairtrial.reports.run_names import name_of

    remarks: list[str] = []
    for suite in imported.suites:
        for run, stored_run in zip(suite.runs, stored[suite.source_id], strict=True):
            name = name_of(stored_run.run)
            remarks += [f"{name}: {remark}" for remark in run.remarks]
            if run.stopped:
                remarks.append(f"{name}: {run.stopped}")
            if stored_run.state == "changed":
                remarks.append(
                    f"{name}: {run.source_id} has changed since it was imported; to import it again: "
                    f"fairtrial store delete {name}"
                )
    return remarks


def _follow_ups(imported: Import, stored: Stored, written: Written) -> list[tuple[str, str]]:
    from fairtrial.reports.run_names import name_of

    rows: list[tuple[str, str]] = []
    suite = next(suite for suite in imported.suites if suite.runs)
    runs = stored[suite.source_id]
    last = name_of(runs[-1].run)
    rows.append((f"fairtrial show {last}", "the report"))
    if len(runs) > 1:
        rows.append((f"fairtrial compare {name_of(runs[-2].run)} {last}", "a real difference?"))
    module = next((path for path, _ in written.get(suite.source_id, ()) if path.suffix == ".py"), None)
    if module is not None:
        rows.append((f"fairtrial rescore {last} {module}", "score the outputs here"))
    return rows
