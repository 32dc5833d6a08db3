"""The list of tasks of three new users; `scripts/first-hour` does them."""

from __future__ import annotations

import ast
import inspect
from collections import Counter

from tests.first_hour.person import ROOT, TASKS, pages_needed, unknown_names
from tests.first_hour.tasks import LIST, list_of_tasks, texts_read
from tests.scripts import load_script


def test_there_are_34_tasks_of_three_people_and_they_need_few_pages() -> None:
    numbers = [one.number for one in TASKS]
    assert Counter(number[0] for number in numbers) == {"A": 12, "B": 11, "C": 11}
    assert len(set(numbers)) == len(numbers)
    for one in TASKS:
        assert all((ROOT / page).is_file() for page in one.pages), one
    assert sum(map(len, pages_needed(TASKS).values())) <= load_script("first-hour").PAGES


def test_programs_of_tasks_import_nothing_of_fairtrial() -> None:
    for one in TASKS:
        module = inspect.getmodule(one.program)
        assert module is not None
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.ImportFrom):
                assert not (node.module or "").startswith("fairtrial"), (module, node.module)


def test_a_name_that_no_page_mentions_is_noticed() -> None:
    known = "from fairtrial import EvalSuite, exact_match"
    assert unknown_names("from fairtrial import EvalSuite\nimport json", known) == set()
    assert unknown_names("from fairtrial.scoring import exact_match, one_of", known) == {"fairtrial.scoring", "one_of"}
    assert unknown_names("import fairtrial.stats", known) == {"fairtrial.stats"}


def test_a_person_knows_the_pages_of_earlier_tasks_but_not_those_of_others() -> None:
    tests_and_ci = (ROOT / "docs/how-to/tests-and-ci.md").read_text(encoding="utf-8")
    by_number = {one.number: one for one in TASKS}
    assert tests_and_ci in texts_read(by_number["A12"])
    assert tests_and_ci not in texts_read(by_number["A1"])
    assert tests_and_ci not in texts_read(by_number["C11"])


def test_the_list_of_the_tasks_is_current() -> None:
    assert LIST.read_text(encoding="utf-8") == list_of_tasks(), "scripts/first-hour --task A1 --write"
