"""A run as one file with which others verify its published figures.

A bundle is a zip file: the run as an SQLite store, the figures, the provenance (data, code, packages, models, seeds,
plan), and a manifest with the SHA-256 of each part. A reader recomputes figures and provenance from the stored trials.
Nothing of a bundle is executed: the store is opened read-only, everything else is JSON.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import shutil
import sqlite3
import stat
import struct
import tempfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from fairtrial._version import __version__
from fairtrial.base.codec import parse_foreign_json, to_json
from fairtrial.base.foreign import check_limit
from fairtrial.data.fingerprint import Fingerprint
from fairtrial.data.session.events import PromptExecuted
from fairtrial.data.session.session import restore_session
from fairtrial.errors import CodecError, DataError, FairtrialError
from fairtrial.reports.compare.compare import compare
from fairtrial.reports.render.renderable import as_text
from fairtrial.reports.report import EvalReport
from fairtrial.store.column_cache import delete_columns
from fairtrial.store.export import opened
from fairtrial.store.portable import load_run, save_run
from fairtrial.store.protocol import RunRecord, RunStore

FORMAT = "fairtrial.bundle/1"
CHECK_FORMAT = "fairtrial.bundle-check/1"
_MANIFEST, _RUN, _FIGURES, _PROVENANCE, _README = (
    "manifest.json", "run.db", "figures.json", "provenance.json", "README.txt"
)  # fmt: skip
_PARTS = (_README, _FIGURES, _PROVENANCE, _RUN)
_STORE_BYTES, _TEXT_BYTES, _MAX_RATIO, _SMALL_BYTES = 4 << 30, 64 << 20, 200, 1 << 20
_CHUNK = 1 << 20
_UNREADABLE = (zipfile.BadZipFile, zlib.error, struct.error, NotImplementedError, RuntimeError, EOFError, ValueError)
_SAME = 1e-9  # Relative: other processors and versions of numpy round differently.
_TEXT = """\
Run {run} of Fairtrial {version}: its trials (run.db), figures and provenance.
To recompute the figures from the trials, with the same or a later version:
    pip install fairtrial
    fairtrial import --verify THIS_FILE
"""


def write_bundle(store: RunStore, run: RunRecord, path: Path, *, content: bool = True) -> str:
    """Write a run as a bundle; returns the SHA-256 of the file. The same run makes the same bytes.

    Args:
        store: The store of the run.
        run: The run.
        path: The zip file, replaced when it is complete.
        content: False leaves out what people wrote and models answered; see `save_run`.
    """
    with tempfile.TemporaryDirectory(dir=path.absolute().parent, prefix=".fairtrial-") as folder:
        database = Path(folder) / _RUN
        save_run(store, run.run_id, database, content=content)
        _fix_revision(database)
        with _loaded(database) as report:
            models = count_models(report.store if content else store, run)
            texts = {
                _README: _TEXT.format(run=run.name, version=__version__),
                _FIGURES: as_text(figures_json(report)),
                _PROVENANCE: as_text(provenance_json(report.run, models) | {"samples": _stored_samples(report)[0]}),
            }
        for name, text in texts.items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        manifest: dict[str, Any] = {
            "format": FORMAT,
            "fairtrial": __version__,
            "run_id": run.run_id,
            "content": content,
            "computed_with": {
                "python": platform.python_version(),
                "numpy": version("numpy"),
                "scipy": version("scipy"),
            },
            "parts": {name: _digest(Path(folder) / name) for name in _PARTS},
        }
        with opened(path, binary=True) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(_info(_MANIFEST), as_text(manifest))
            for name in _PARTS:
                with (Path(folder) / name).open("rb") as source, archive.open(_info(name), "w", force_zip64=True) as to:
                    shutil.copyfileobj(source, to, _CHUNK)
    return str(_digest(path)["sha256"])


def _info(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
    info.compress_type, info.external_attr = zipfile.ZIP_DEFLATED, (stat.S_IFREG | 0o644) << 16
    return info


def _fix_revision(database: Path) -> None:
    """Replace the random revision of the run by one that depends on the content alone."""
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("UPDATE runs SET revision = 0")
        connection.commit()
        connection.execute("VACUUM")
        revision = int(_digest(database)["sha256"][:15], 16)
        connection.execute("UPDATE runs SET revision = ?", (revision,))
        connection.commit()


def _digest(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "bytes": path.stat().st_size}


@contextmanager
def _loaded(database: Path) -> Iterator[EvalReport]:
    """Open the saved run of a bundle, without the figures that a cache has or gets of it."""
    store, run_id = load_run(database)
    try:
        yield EvalReport(store, store.get_run(run_id))
    finally:
        store.close()
        delete_columns(str(database), run_id)


def figures_json(report: EvalReport) -> dict[str, Any]:
    """Return the figures of a run: its report, and the comparison of its experiments with the first (or as planned)."""
    parts = report.parts
    return {"report": report.to_json(), "comparison": compare(*parts).to_json() if len(parts) > 1 else None}


def provenance_json(run: RunRecord, models: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    """Return what a run was made of, as it was recorded when it was executed: names, versions and digests."""
    identity: Mapping[str, Any] = run.identity or {}
    return {
        "format": "fairtrial.provenance/1",
        "run": {"run_id": run.run_id, "name": run.name, "status": run.status, "parent_run": run.parent_run},
        "dataset": {
            "name": run.dataset_name,
            "version": run.dataset_version,
            "fingerprint": run.dataset_fingerprint,
            "order": run.noted.order,
            "samples": run.dataset_size,
        },
        "experiments": {name: to_json(run.params.get(name)) for name in run.experiments},
        "repeats": run.repeats,
        "evaluator": run.evaluator,
        "settings": to_json(dict(run.config)),
        "code": to_json({name: identity.get(name) for name in ("code", "evaluator", "parts", "reads")}),
        "packages": to_json(identity.get("packages")),
        "models": {name: dict(calls) for name, calls in models.items()},
        "plans": to_json(run.notes.get("plans") or []),
    }


def count_models(store: RunStore, run: RunRecord) -> dict[str, dict[str, int]]:
    """Return the recorded model calls by experiment and model, as providers named it; judges included."""
    found: dict[str, Counter[str]] = {name: Counter() for name in run.experiments}
    for result in store.results(run.run_id, outputs=False, snapshots=True):
        if result.snapshot and b"PromptExecuted" in result.snapshot:
            calls = restore_session(result.snapshot).everything().query(PromptExecuted).all()
            found[result.experiment].update(call.model for call in calls if call.model)
    return {name: dict(sorted(calls.items())) for name, calls in found.items()}


class FigureDifference(NamedTuple):
    """A figure that is not what was published; a side that does not have it is `missing`."""

    name: str
    published: Any
    recomputed: Any

    def __str__(self) -> str:
        return f"{self.name}: published {_shown(self.published)}, recomputed {_shown(self.recomputed)}"


missing = type("Missing", (), {"__repr__": lambda _: "nothing", "__slots__": ()})()


def _shown(value: Any) -> str:
    text = repr(value) if value is missing else json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


@dataclass(frozen=True, slots=True)
class BundleCheck:
    """What verifying a bundle came to.

    Attributes:
        sha256: The SHA-256 of the whole file, to be compared with the published one.
        made_by: The version of Fairtrial that wrote it.
        run: The run.
        trials: Number of stored trials.
        samples_match: Whether the samples have the fingerprint of the dataset; None if some or all are not there.
        figures: Number of published values that were compared.
        unpublished: Number of values that this version computes and the bundle does not have.
        provenance: The same of the provenance.
        differences: What was not as published.
    """

    sha256: str
    made_by: str
    run: RunRecord
    trials: int
    samples_match: bool | None
    figures: int
    unpublished: int
    provenance: int
    differences: Sequence[FigureDifference]

    @property
    def matches(self) -> bool:
        """Whether everything is as published."""
        return self.samples_match is not False and not self.differences

    def to_json(self) -> dict[str, Any]:
        """Return the check as JSON."""
        return {
            "format": CHECK_FORMAT,
            "run_id": self.run.run_id,
            "name": self.run.name,
            "matches": self.matches,
            "sha256": self.sha256,
            "made_by": self.made_by,
            "verified_by": __version__,
            "trials": self.trials,
            "samples_match": self.samples_match,
            "figures": self.figures,
            "unpublished": self.unpublished,
            "provenance": self.provenance,
            "differences": [
                {"name": name, **{side: value for side, value in sides if value is not missing}}
                for name, *values in self.differences
                for sides in [tuple(zip(("published", "recomputed"), values, strict=True))]
            ],
        }


class OpenBundle(NamedTuple):
    """A bundle whose parts have the digests of its manifest."""

    check: BundleCheck
    report: EvalReport


@contextmanager
def open_bundle(path: Path) -> Iterator[OpenBundle]:
    """Open a bundle and verify it; the store in it is closed at the end.

    Raises:
        DataError: it is damaged, its parts are not those of the manifest, or it is of a newer format.
        LimitExceededError: it is too large, or expands too far.
    """
    with tempfile.TemporaryDirectory(prefix="fairtrial-") as place:
        folder = Path(place)
        manifest = _unpack(path, folder)
        published = {name: _json_part(path, name, (folder / name).read_bytes()) for name in (_FIGURES, _PROVENANCE)}
        with _loaded(folder / _RUN) as report:
            if report.run_id != manifest.get("run_id"):
                raise DataError(f"{path} is not a bundle: its run is not the one that its manifest names")
            try:
                check = _verified(path, report, manifest, published)
            except FairtrialError:
                raise
            except (LookupError, ValueError, ArithmeticError) as error:  # The columns of a store fit each other.
                raise DataError(f"{path} is not a bundle: the run in it contradicts itself: {error}") from None
            yield OpenBundle(check, report)


def _verified(path: Path, report: EvalReport, manifest: Mapping[str, Any], published: Mapping[str, Any]) -> BundleCheck:
    complete, made_by = manifest.get("content") is True, str(manifest.get("fairtrial"))
    # Without transcripts nothing tells the models.
    stored, samples_match = _stored_samples(report, complete=complete)
    told = {} if complete else {key: value for key, value in published[_PROVENANCE].items() if key == "models"}
    recomputed = {
        _FIGURES: figures_json(report),
        _PROVENANCE: provenance_json(report.run, count_models(report.store, report.run)) | {"samples": stored} | told,
    }
    counts, unpublished, differences = {}, 0, []
    for name, tree in recomputed.items():
        # Through JSON, as the published ones: a float is then the same float, and a tuple a list.
        ours, theirs = dict(_leaves(json.loads(as_text(tree)))), dict(_leaves(published[name]))
        counts[name] = len(theirs)
        unpublished += len(ours.keys() - theirs.keys())
        differences += [
            FigureDifference(f"{name}: {_place(key)}", theirs.get(key, missing), ours.get(key, missing))
            for key in dict.fromkeys((*theirs, *ours))
            # A later version may have figures that an earlier one had not; all have the main ones.
            if not _equal(theirs.get(key, missing), ours.get(key, missing))
            and (key in theirs or made_by == __version__ or _is_main(key))
        ]
    return BundleCheck(
        sha256=_digest(path)["sha256"],
        made_by=made_by,
        run=report.run,
        trials=report.total,
        samples_match=samples_match,
        figures=counts[_FIGURES],
        unpublished=unpublished,
        provenance=counts[_PROVENANCE],
        differences=differences,
    )


def _stored_samples(report: EvalReport, *, complete: bool = True) -> tuple[dict[str, Any], bool | None]:
    """Return number and digest of the stored samples, and whether they are those of the dataset.

    That is None if the manifest says that they were left out, and if the run ended before it reached all of them.
    """
    fingerprint, bare, number = Fingerprint(), True, 0
    for _ordinal, sample in report.store.samples(report.run_id):
        fingerprint.add(sample)
        bare = bare and sample.input is None and not sample.has_expected
        number += 1
    digest = fingerprint.hexdigest()
    untold = (bare and not complete) or number < report.run.dataset_size
    return {"stored": number, "digest": digest}, None if untold else digest == report.run.dataset_fingerprint


type _Path = tuple[str | tuple[str | int], ...]


def _leaves(tree: Any, at: _Path = ()) -> Iterator[tuple[_Path, Any]]:
    """Yield the values of a JSON tree with their places, each once; items of lists by their names, if they have one."""
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from _leaves(value, (*at, str(key)))
    elif isinstance(tree, list) and tree:
        names = [item.get("name", item.get("metric")) if isinstance(item, dict) else None for item in tree]
        named = all(isinstance(name, str) for name in names) and len(set(names)) == len(names)
        for index, item in enumerate(tree):
            yield from _leaves(item, (*at, ((names[index] or "") if named else index,)))
    else:
        yield at, tree


def _is_main(path: _Path) -> bool:
    """Return whether a figure is part of the pass rate of an experiment: without it nothing was published."""
    match path:
        case ("report", "experiments", _, "estimates", ("pass_rate",), "value" | "low" | "high" | "n"):
            return True
    return False


def _place(path: _Path) -> str:
    """Return a place in words: `experiments[plain].trials`."""
    return "".join(f"[{part[0]}]" if isinstance(part, tuple) else f".{part}" for part in path).lstrip(".")


def _equal(one: Any, other: Any) -> bool:
    if type(one) in (int, float) and type(other) in (int, float):
        return math.isclose(one, other, rel_tol=_SAME, abs_tol=1e-12) or one == other
    return type(one) is type(other) and bool(one == other)


def _unpack(path: Path, folder: Path) -> dict[str, Any]:
    """Write the parts of a bundle into a folder, under our names only; returns the manifest."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            _check_members(path, members)
            content = {member.filename: member for member in members}
            manifest = _manifest(path, archive, content)
            for name in _PARTS:
                _extract(path, archive, content[name], folder / name)
    except DataError:
        raise
    except (*_UNREADABLE, OSError) as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise
        raise DataError(f"{path} is damaged or not a bundle: {error}\nwas it copied completely?") from None
    for name in _PARTS:
        wanted, found = manifest["parts"].get(name), _digest(folder / name)
        if wanted != found:
            raise DataError(f"{path} was changed: {name} does not have the SHA-256 of the manifest")
    return manifest


def _check_members(path: Path, members: Sequence[zipfile.ZipInfo]) -> None:
    names = [member.filename for member in members]
    for member in members:
        shown = repr(member.filename[:100])
        if member.filename not in (_MANIFEST, *_PARTS):
            leads = ".." in member.filename or member.filename.startswith(("/", "\\")) or ":" in member.filename
            how = "leads out of the archive" if leads else "is no part of a bundle"
            raise DataError(f"{path} is not a bundle: {shown} {how}")
        if names.count(member.filename) > 1:
            raise DataError(f"{path} is not a bundle: it has two parts named {shown}")
        if stat.S_IFMT(member.external_attr >> 16) not in (0, stat.S_IFREG):
            raise DataError(f"{path} is not a bundle: {shown} is a link or another special file")
        if member.flag_bits & 1:
            raise DataError(f"{path} is not a bundle: {shown} is encrypted")
        limit = _STORE_BYTES if member.filename == _RUN else _TEXT_BYTES
        check_limit(f"{path}: {member.filename}", "bytes when it is expanded", member.file_size, limit)
        ratio = max(_SMALL_BYTES, _MAX_RATIO * member.compress_size)
        check_limit(f"{path}: {member.filename}", "bytes when it is expanded", member.file_size, ratio)
    lacking = [name for name in (_MANIFEST, *_PARTS) if name not in names]
    if lacking:
        raise DataError(f"{path} is not a bundle: it has no {lacking[0]}")


def _manifest(path: Path, archive: zipfile.ZipFile, members: Mapping[str, zipfile.ZipInfo]) -> dict[str, Any]:
    manifest = _json_part(path, _MANIFEST, archive.read(members[_MANIFEST]))
    format = manifest.get("format")
    if format != FORMAT:
        name, _, version = str(format)[:100].rpartition("/")
        if name == FORMAT.rpartition("/")[0] and version.isdigit():
            maker = str(manifest.get("fairtrial"))[:40]
            raise DataError(
                f"{path} has the format {name}/{version} of Fairtrial {maker}, this one reads {FORMAT}\n"
                "install that version to verify it"
            )
        raise DataError(f"{path} is not a bundle: its manifest has no format {FORMAT}")
    if not isinstance(manifest.get("parts"), dict):
        raise DataError(f"{path} is not a bundle: its manifest names no parts")
    return manifest


def _json_part(path: Path, name: str, content: bytes) -> dict[str, Any]:
    try:
        tree = parse_foreign_json(content)
        json.loads(content.decode("utf-8-sig"), object_pairs_hook=_once)
    except (CodecError, ValueError) as error:
        raise DataError(f"{path}: {name} cannot be read: {error}") from None
    if not isinstance(tree, dict):
        raise DataError(f"{path}: {name} must be a JSON object")
    return tree


def _once(pairs: Sequence[tuple[str, Any]]) -> None:
    """Refuse a name that occurs twice in an object: readers differ in which value they take."""
    for name, number in Counter(name for name, _ in pairs).items():
        if number > 1:
            raise ValueError(f"it has {name[:100]!r} twice in one object")


def _extract(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo, target: Path) -> None:
    size = 0
    with archive.open(member) as source, target.open("xb") as file:
        while chunk := source.read(_CHUNK):
            size += len(chunk)
            if size > member.file_size:  # What the directory of the archive says was checked.
                raise DataError(f"{path} is not a bundle: {member.filename} is larger than it says")
            file.write(chunk)
