"""Runs as static pages."""

from __future__ import annotations

import html
import posixpath
import re
import zipfile
from pathlib import Path

from fairtrial.viewer.site import write_site
from tests.viewer.conftest import Viewed


def test_a_site_has_the_report_and_every_trial_and_its_links_lead_to_its_files(viewed: Viewed, tmp_path: Path) -> None:
    write_site(viewed.store, viewed.store.get_run("support-run-2"), tmp_path / "site.zip")
    with zipfile.ZipFile(tmp_path / "site.zip") as archive:
        pages = {name: archive.read(name).decode() for name in archive.namelist()}
    assert {"index.html", "trials.html", "view.css", "icon.svg", "t/0001.html", "t/0080.html"} <= set(pages)
    assert "95% interval" in pages["index.html"]
    for name, text in pages.items():
        if not name.endswith(".html"):
            continue
        assert "<script" not in text
        assert "Content-Security-Policy" in text
        for link in re.findall(r'(?:href|src)="([^"]+)"', text):
            target, _, anchor = html.unescape(link).partition("#")
            found = posixpath.normpath(posixpath.join(posixpath.dirname(name), target)) if target else name
            assert found in pages, f"{name} links to {link}"
            if anchor:
                assert f'id="{anchor}"' in pages[found], f"{name} links to {link}"


def test_the_same_run_makes_the_same_file(viewed: Viewed, tmp_path: Path) -> None:
    for name in ("one.zip", "two.zip"):
        write_site(viewed.store, viewed.store.get_run("support-run-1"), tmp_path / name)
    assert (tmp_path / "one.zip").read_bytes() == (tmp_path / "two.zip").read_bytes()


def test_hostile_texts_are_text_in_a_site(viewed: Viewed, tmp_path: Path) -> None:
    write_site(viewed.store, viewed.store.get_run("hostile-run"), tmp_path / "site.zip")
    with zipfile.ZipFile(tmp_path / "site.zip") as archive:
        for name in archive.namelist():
            assert re.fullmatch(r"(t/\d{4}|index|trials)\.html|view\.css|icon\.svg", name)
            text = archive.read(name).decode()
            for attack in ("<script", "<img", "<iframe", "<base", 'onerror="', "<style>"):
                assert attack not in text, name
