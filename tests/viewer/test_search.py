"""The page of a search: the test result, the candidates with their parents, and what differs in their texts."""

from __future__ import annotations

import asyncio
import html
import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from fairtrial import open_store
from fairtrial.reports.search.search import CANDIDATE, read_search
from fairtrial.store.notes import write_notes
from fairtrial.viewer.pages.search import _in_lineage
from tests.reports.searches import write_search
from tests.viewer.conftest import HOSTILE, Viewed, open_session, segment, start_server
from tests.viewer.searches import add_search

MANY = 25


@dataclass
class Searched(Viewed):
    """A server with searches."""

    name: str

    def page(self, name: str, query: str = "") -> str:
        self.json(f"search?name={segment(name)}")  # Waits for the figures.
        answer = self.get(f"search?name={segment(name)}{query}")
        assert answer.status == 200, answer.text
        return answer.text


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Searched]:
    path = tmp_path_factory.mktemp("searches") / "runs.db"
    store = open_store(path)
    name = asyncio.run(write_search(store))
    texts = [f"Answer in {number} words. {HOSTILE[number % len(HOSTILE)]}" for number in range(MANY)]
    add_search(store, "many", texts, [max(0, number - 1) for number in range(MANY)], error=HOSTILE[0])
    server, thread = start_server(path, user="me")
    yield Searched(server, store, open_session(server), name)
    server.stop()
    thread.join(60)
    store.close()
    assert not thread.is_alive()


def plain(text: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", text)).split())


def articles(text: str) -> dict[str, str]:
    """Return what is said of each candidate, by its name."""
    found = re.findall(r'<article class="flip" id="c\d+">(.*?)</article>', text, re.DOTALL)
    return {re.findall(r"<h3>([^<]+?) *<", one)[0]: one for one in found}


def test_the_page_has_the_single_test_result_with_the_number_of_its_look(searched: Searched) -> None:
    page = searched.page(searched.name)
    search = read_search(searched.store, searched.name)
    assert search.tested is not None
    text = plain(page)
    assert f"On the test split: {search.tested.sentence}" in text
    assert "First look at this test split" in text
    assert "not evidence" in text
    assert searched.json(f"search?name={searched.name}") == search.to_json()
    for link in re.findall(r'href="\./((?:compare|matrix)\?[^"]+)"', page):
        assert searched.get(html.unescape(link)).status == 200, link
    assert len(searched.store.looks(search.comparison.looks.split)) == 1  # type: ignore[union-attr]


def test_each_candidate_has_its_parents_intervals_runs_and_errors(searched: Searched) -> None:
    page = searched.page(searched.name)
    search = read_search(searched.store, searched.name)
    rows = re.findall(r'<tr class="row">(.*?)</tr>', page, re.DOTALL)
    names = ["baseline", "└ candidate 1", "└ candidate 2 chosen", "└ candidate 3"]
    assert [row.count("\u2003") for row in rows] == [0, 0, 1, 0]
    assert all(plain(row).startswith(name) for row, name in zip(rows, names, strict=True))
    assert "candidate 1</a></td>" in rows[2]
    for row, one in zip(rows, search.candidates, strict=True):
        for score in (one.train, one.validation):
            if score is not None:
                assert f"{100 * score.low:.1f}% to {100 * score.high:.1f}%" in plain(row)  # type: ignore[operator]
    found = articles(page)
    [failed] = search.candidates[3].train.errors  # type: ignore[union-attr]
    assert f"left out after errors: {failed}" in plain(found["candidate 3"])
    for one in search.candidates:
        runs = {
            run.name for run in searched.store.runs() if run.tags.get(CANDIDATE) == one.id and "+search" in run.suite
        }
        linked = set(re.findall(r">(support\+search@\d+)</a>", found[one.name]))
        assert linked == runs
        for link in re.findall(r'href="\./([^"?]+)"', found[one.name]):
            assert searched.get(link).status == 200, link


def test_what_differs_from_the_parent_or_from_the_baseline_is_marked(searched: Searched) -> None:
    to_parent = articles(searched.page(searched.name))["candidate 2"]
    assert re.findall("<mark>(.*?)</mark>", to_parent, re.DOTALL) == ["word.", "word.\nCheck it twice."]
    assert '<p class="dim small">candidate 1</p>' in to_parent
    to_baseline = articles(searched.page(searched.name, "&against=baseline"))["candidate 2"]
    assert re.findall("<mark>(.*?)</mark>", to_baseline, re.DOTALL) == [
        "Answer.",
        "Answer in one word.\nCheck it twice.",
    ]
    assert '<p class="dim small">baseline</p>' in to_baseline
    assert "<mark>" not in articles(searched.page(searched.name))["baseline"]


def test_the_list_of_runs_and_the_pages_of_its_runs_lead_to_a_search(searched: Searched) -> None:
    link = f'href="./search?name={searched.name}"'
    assert link in searched.get().text
    for run in ("support%252Bsearch@1", "support%252Btest@1"):
        assert f"{link}>Search</a>" in searched.get(run).text
        assert f'href="../search?name={searched.name}">Search</a>' in searched.get(f"{run}/trials").text
    assert "Searches" not in searched.get("?suite=support").text


def test_many_candidates_have_pages_and_links_across_them(searched: Searched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairtrial.viewer.pages.search._ON_A_PAGE", 10)
    seen: list[str] = []
    links = 0
    address = "search?name=many"
    searched.json(address)
    while address:
        page = searched.get(html.unescape(address)).text
        found = articles(page)
        assert len(found) <= 10
        seen += found
        for parent, number in re.findall(r'<td class="left"><a href="\./([^"]+)#c(\d+)"', page)[:1]:
            assert f'id="c{number}"' in searched.get(html.unescape(parent)).text
            links += 1
        following = re.findall(r'rel="next" href="\./([^"#]+)', page)
        address = following[0] if following else ""
    assert seen == ["baseline", *(f"candidate {number}" for number in range(1, MANY))]
    assert links == 3
    assert articles(searched.page("many", "&from=9000"))
    assert articles(searched.page("many", "&from=-x")).keys() >= {"baseline"}
    assert not any(text in searched.page("many") for text in HOSTILE if "<" in text)


def test_a_search_that_is_not_finished_or_unknown_says_so(searched: Searched) -> None:
    assert searched.get("search?name=nothing").status == 404
    assert searched.get("search").status == 404
    add_search(searched.store, "going", ["Answer.", "Guess."], [0, 0], suite="going")
    searched.store.update_run("going-0", notes=write_notes(search=None))
    searched.store.update_run("going-1", status="interrupted", finished_at=None)
    assert "unfinished: the same command continues the search" in plain(searched.page("going"))


def test_the_order_of_lineage_knows_every_candidate_once() -> None:
    def made(*parents: str) -> list[tuple[int, int]]:
        return _in_lineage([{"id": str(at), "parents": one.split()} for at, one in enumerate(parents)])

    assert made("", "0", "0", "1", "2 1", "3") == [(0, 0), (1, 1), (3, 2), (5, 3), (2, 1), (4, 2)]
    assert made("", "2", "1") == [(0, 0), (1, 0), (2, 1)]
    chain = made("", *(str(number) for number in range(5_000)))
    assert chain == [(number, number) for number in range(5_001)]
