"""Paths that foreign files name stay in the folder that the user gave, also behind links."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
from pathlib import Path

import pytest

from fairtrial.base.foreign import inside
from fairtrial.cli.command_init import init
from fairtrial.data.attachment import Attachment, BlobFolder
from fairtrial.errors import BodyError, DataError
from fairtrial.integrations.importers.openai_evals import OpenAIEvals
from fairtrial.integrations.model_server import HostedEvals
from fairtrial.mailbox.body import ClaimCheck
from fairtrial.runs.imported import load_importer
from tests.integrations.importers.project import CRITERIA, ROWS, answers, eval_of, run_of, write_archive, write_lines

LOG = Path(__file__).with_name("integrations") / "importers" / "files" / "inspect" / "forecast.eval"
SAMPLES = Path(__file__).with_name("integrations") / "importers" / "files" / "lm-eval"


@pytest.mark.parametrize(
    "name",
    [
        "..",
        ".",
        "",
        "../given",
        "../secret",
        "a/../../secret",
        "/etc/passwd",
        "out/secret",
        "away",
        "a\0b",
        "x" * 300,
        "\ud800",
    ],
)
def test_a_path_that_leads_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_text("s")
    folder = tmp_path / "given"
    folder.mkdir()
    (folder / "out").symlink_to(tmp_path)
    (folder / "away").symlink_to(tmp_path / "secret")
    with pytest.raises(DataError, match=r"must be a file in .*given"):
        inside(folder, name)


def test_a_path_in_the_folder_is_returned_as_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "real" / "sub").mkdir(parents=True)
    (tmp_path / "given").symlink_to(tmp_path / "real")  # The user's own link to the folder.
    (tmp_path / "real" / "near").symlink_to("sub")
    folder = tmp_path / "given"
    for name in ("a.jsonl", "sub/a.jsonl", "near/a.jsonl", "sub/../a.jsonl", "missing/a.jsonl"):
        assert inside(folder, name) == folder / name


def saved(folder: Path, *, file_id: str = "file-1", run_id: str = "evalrun_a") -> Path:
    """A saved project whose run names its items and its data source."""
    items = answers("evalrun_a", {})[:2]
    source = {"type": "jsonl", "source": {"type": "file_id", "id": file_id}}
    project = HostedEvals(
        evals=[eval_of("eval_capitals", "Capitals", CRITERIA)],
        runs=[{**run_of("evalrun_a", items, data_source=source), "id": run_id}],
        items={"evalrun_a": items},
        files={"file-1": "".join(json.dumps(row) + "\n" for row in ROWS)},
    )
    return write_archive(project, folder)


def samples_of(path: Path) -> int:
    (suite,) = OpenAIEvals().read(path).suites
    return len(suite.dataset)


def test_items_and_data_sources_in_the_folder_are_read(tmp_path: Path) -> None:
    assert samples_of(saved(tmp_path / "saved")) == len(ROWS)


@pytest.mark.parametrize("run_id", ["../../outside", "/{folder}/outside", "../../saved/../outside"])
def test_the_id_of_a_run_reads_no_file_outside(tmp_path: Path, run_id: str) -> None:
    write_lines(tmp_path / "outside.jsonl", answers("evalrun_a", {})[:2])
    path = saved(tmp_path / "saved", run_id=run_id.format(folder=tmp_path))
    with pytest.raises(DataError, match=r"outside\.jsonl' must be a file in .*items"):
        OpenAIEvals().read(path)


@pytest.mark.parametrize("file_id", ["../../secret.jsonl", "{folder}/secret.jsonl", "/etc/passwd", ".."])
def test_the_id_of_a_data_source_reads_no_file_outside(tmp_path: Path, file_id: str) -> None:
    write_lines(tmp_path / "secret.jsonl", ROWS)
    with pytest.raises(DataError, match=r"must be a file in .*files") as raised:
        OpenAIEvals().read(saved(tmp_path / "saved", file_id=file_id.format(folder=tmp_path)))
    assert "root:" not in str(raised.value)


@pytest.mark.parametrize("name", ["items", "files", "items/evalrun_a.jsonl", "files/file-1", "runs.jsonl"])
def test_a_link_out_of_a_saved_folder_is_not_followed(tmp_path: Path, name: str) -> None:
    path = saved(tmp_path / "saved")
    shutil.move(path / name, tmp_path / "elsewhere")
    (path / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="it leads elsewhere"):
        OpenAIEvals().read(path)


@pytest.mark.parametrize(
    ("format", "source", "name"),
    [
        ("inspect", LOG, "a.eval"),
        ("lm-eval", next(SAMPLES.glob("samples_capitals_text*")), "sub/samples_a_2026-11-16T22-14-33.jsonl"),
    ],
)
def test_a_folder_of_results_may_not_link_to_files_elsewhere(
    tmp_path: Path, format: str, source: Path, name: str
) -> None:
    folder = tmp_path / "logs"
    (folder / name).parent.mkdir(parents=True)
    (folder / name).symlink_to(source)
    with pytest.raises(DataError, match="it leads elsewhere"):
        load_importer(format).read(folder)
    assert load_importer(format).read(folder / name).suites  # A file that the user names may be a link.


def test_results_beside_samples_may_not_be_a_link_elsewhere(tmp_path: Path) -> None:
    (samples,) = SAMPLES.glob("samples_capitals_text*")
    (results,) = SAMPLES.glob("results_*")
    shutil.copy(samples, tmp_path)
    (tmp_path / results.name).symlink_to(results)
    with pytest.raises(DataError, match=r"results_.*it leads elsewhere"):
        load_importer("lm-eval").read(tmp_path / samples.name)


def test_attachments_and_claim_checks_follow_no_link_out_of_their_folder(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    sha256 = hashlib.sha256(b"secret").hexdigest()
    root = tmp_path / "blobs"
    (root / sha256[:2]).mkdir(parents=True)
    (root / sha256[:2] / sha256).symlink_to(secret)
    with pytest.raises(DataError, match="it leads elsewhere"):
        BlobFolder(root).get(Attachment(sha256))
    with pytest.raises(BodyError, match="it leads elsewhere"):
        asyncio.run(ClaimCheck(root).fetch(sha256))
    other = BlobFolder(tmp_path / "other")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / sha256[:2]).symlink_to(tmp_path)
    with pytest.raises(DataError, match="it leads elsewhere"):
        other.put(b"secret")
    assert not (tmp_path / sha256).exists()


def test_a_new_project_is_not_written_through_a_link(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "evals.py").symlink_to(tmp_path / "victim.py")
    with pytest.raises(DataError, match="it leads elsewhere"):
        init(folder)
    assert not (tmp_path / "victim.py").exists()
