"""`fairtrial dataset`: samples chosen from failures, and versions of datasets."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fairtrial.cli import options
from fairtrial.cli.user_errors import UserError

if TYPE_CHECKING:
    from fairtrial.reports.datasets.versions import Contents

_NAMED = 5

app = typer.Typer(no_args_is_help=True)


@app.callback()
def dataset() -> None:
    """Collect failed trials as samples; compare versions.

    \b
    Examples:
      fairtrial dataset curate support --failed --to failures.jsonl
      fairtrial dataset log questions
      fairtrial dataset diff support@3 support@7
    """


@app.command()
def curate(
    run: options.Run,
    to: Annotated[Path, typer.Option("--to", metavar="FILE", help="The .jsonl file; what it has stays.")],
    failed: Annotated[bool, typer.Option("--failed", help="Scored trials that did not pass.")] = False,
    disputed: Annotated[
        bool, typer.Option("--disputed", help="Trials on which a person and the evaluator do not agree.")
    ] = False,
    store: options.Store = None,
    json: options.Json = False,
) -> int:
    """Add failed or disputed trials of a run to a file of samples.

    Every sample has its origin in its metadata, and the names of people whose labels confirm or dispute that it
    failed. Samples with nearly the same input are added once. The samples are the split `failures`: reports say that
    it has no pass rate of its own. The same command adds nothing twice.

    \b
    Examples:
      fairtrial dataset curate support --failed --to failures.jsonl
      fairtrial dataset curate support --failed --disputed --to failed.jsonl
    """
    from fairtrial.base.formatting import count
    from fairtrial.cli.screen import note, out, print_json
    from fairtrial.reports.datasets.curate import curate as add
    from fairtrial.reports.figures.metrics import ExperimentSource
    from fairtrial.reports.render.safe_text import plain

    if not failed and not disputed:
        raise UserError("nothing is chosen", "give --failed, --disputed or both")
    if to.suffix != ".jsonl":
        raise UserError(f"--to must be a .jsonl file (got {to})", f"as in: --to {to.with_suffix('.jsonl')}")
    opened = options.open_existing(store)
    named = options.find_run(opened, run)
    sources = [ExperimentSource(opened, named.run, name) for name in named.experiments]
    found = add(sources, to, failed=failed, disputed=disputed)
    if json:
        print_json(dict(found.to_json()))
        return 0
    console = out()
    console.print(f"{to}: {count(len(found.added), 'new sample')}, {found.samples:,} in all", markup=False)
    if found.known:
        console.print(f"{count(found.known, 'sample')} of {named} were there before", markup=False)
    for name, other in found.similar[:_NAMED]:
        console.print(f"left out: {plain(name)}, nearly the same as {plain(other)}", markup=False)
    if len(found.similar) > _NAMED:
        console.print(f"left out: {len(found.similar) - _NAMED:,} more that are nearly the same", markup=False)
    if not found.samples:
        note(f"no trial of {named} was chosen; no file was written")
    return 0


@app.command()
def log(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[DATASET]", help="The name of a dataset (default: all).", show_default=False),
    ] = None,
    store: options.Store = None,
    json: options.Json = False,
) -> int:
    """List the contents of a dataset that runs have used, newest first.

    A content is known by the fingerprint of its samples; its parent is the one that runs used before it.

    \b
    Examples:
      fairtrial dataset log
      fairtrial dataset log questions --json
    """
    from fairtrial.base.codec import to_json
    from fairtrial.base.formatting import ago
    from fairtrial.cli.screen import add_row, make_table, note, out, print_json, print_table
    from fairtrial.reports.datasets.versions import dataset_versions
    from fairtrial.reports.render.safe_text import plain

    runs = options.open_existing(store).runs()
    names = list(dict.fromkeys(run.dataset_name for run in runs)) if name is None else [name]
    versions = {one: dataset_versions(run for run in runs if run.dataset_name == one)[::-1] for one in names}
    if json:
        facts = [{"name": one, "versions": [to_json(version) for version in found]} for one, found in versions.items()]
        print_json({"format": "fairtrial.dataset_log/1", "datasets": facts})
        return 0
    if not any(versions.values()):
        note(f"no run used a dataset named {plain(name)!r}" if name else "this store has no runs yet")
        return 0
    table = make_table(
        "dataset", "content", "parent", "samples", "when", "runs", "first run", right=("samples", "runs"),
        cut=("dataset", "first run"),
    )  # fmt: skip
    for one, found in versions.items():
        for version in found:
            split = f" ({version.split})" if version.split else ""
            parent = (version.parent or "-")[:8]
            add_row(
                table,
                f"{plain(one)}{split}",
                version.fingerprint[:8],
                parent,
                f"{version.samples:,}",
                ago(version.created_at),
                f"{version.runs:,}",
                plain(version.first_run),
            )
    print_table(out(), table)
    return 0


@app.command()
def diff(
    before: Annotated[str, typer.Argument(metavar="BEFORE", help="A run, or a file of samples.", show_default=False)],
    after: Annotated[str, typer.Argument(metavar="AFTER", help="A run, or a file of samples.", show_default=False)],
    store: options.Store = None,
    json: options.Json = False,
) -> int:
    """Show what changed between the samples of two runs or files.

    A comparison of two runs pairs the samples with the same id, input and expected value; all others are left out.

    \b
    Examples:
      fairtrial dataset diff support@3 support@7
      fairtrial dataset diff support@latest questions.jsonl
    """
    from fairtrial.base.formatting import count
    from fairtrial.cli.screen import out, print_json
    from fairtrial.reports.datasets.versions import diff_versions
    from fairtrial.reports.render.safe_text import plain

    found = diff_versions(_contents(before, store), _contents(after, store))
    if json:
        print_json(dict(found.to_json()))
        return 0
    console = out()
    console.print(f"{count(found.same, 'sample')} the same: comparisons pair them", markup=False)
    for what, names in (
        ("added", found.added),
        ("removed", found.removed),
        ("with another input", found.input),
        ("with another expected value", found.expected),
        ("with other metadata", found.metadata),
    ):
        if names:
            more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
            console.print(f"{count(len(names), 'sample')} {what}: {', '.join(map(plain, names[:_NAMED]))}{more}",
                          markup=False)  # fmt: skip
    return 0


def _contents(text: str, store: str | None) -> Contents:
    """Return the contents of a file, or of a run of the store."""
    from fairtrial.cli.screen import note
    from fairtrial.data.dataset import Dataset
    from fairtrial.reports.datasets.versions import contents_of, stored_contents

    if Path(text).is_file():
        return contents_of(Dataset.load(text))
    opened = options.open_existing(store)
    run = options.find_run(opened, text).run
    found = stored_contents(opened, run)
    if len(found) < run.dataset_size:
        note(f"{run.name} did not reach all samples: {run.dataset_size - len(found):,} of {run.dataset_size:,} unknown")
    return found
