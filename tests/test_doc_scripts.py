"""Generated parts of the documentation are up to date: pictures and command options."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import re
import subprocess
import sys
import threading
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from playwright.sync_api import Page, sync_playwright

import fairtrial
from fairtrial import ToolInvoked
from fairtrial.cli.app import command_tree
from tests.notebooks import execute, printed, start_kernel
from tests.scripts import load_script

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "pictures"
REFERENCE = ROOT / "docs" / "reference" / "commands.md"


def test_the_pictures_are_those_that_the_commands_make_today() -> None:
    made = load_script("pictures").pictures()
    kept = {path.stem: path.read_text(encoding="utf-8") for path in PICTURES.glob("*.svg")}
    assert sorted(made) == sorted(kept)
    assert [name for name in made if made[name] != kept[name]] == [], "run scripts/pictures and look at them"


@pytest.mark.long
def test_the_screenshots_show_the_pages_of_today(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = load_script("pictures")
    assert script.stale() == [], "run scripts/pictures --screens and look at them"
    styles = tmp_path / "view.css"
    styles.write_text("body { color: red }")
    monkeypatch.setattr(script, "STYLES", styles)
    assert script.stale() == sorted(path.stem for path in PICTURES.glob("view-*.png"))


@pytest.mark.parametrize("path", sorted(PICTURES.glob("*.svg")), ids=lambda path: path.stem)
def test_a_picture_has_a_title_and_fetches_nothing(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    tree = ElementTree.fromstring(text)
    title = tree.find("{http://www.w3.org/2000/svg}title")
    assert title is not None
    assert title.text
    assert set(re.findall(r"https?://[^\"' )]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "<script" not in text
    assert "@import" not in text


def test_every_picture_is_shown_somewhere() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    shown = "".join(page.read_text(encoding="utf-8") for page in pages)
    assert [path.name for path in PICTURES.glob("*.*g") if f"pictures/{path.name})" not in shown] == []


def test_the_reference_has_every_option_of_every_command_in_the_words_of_its_help() -> None:
    text = REFERENCE.read_text(encoding="utf-8")
    assert load_script("pages").rewritten_commands(text) == text, "run scripts/pages --write"


def test_the_reference_is_complete_without_its_script() -> None:
    """The options are looked up in the page here, so that a fault of the script is no fault of the page."""
    parts = re.split(r"^### (.*)$", REFERENCE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    root: Any = command_tree()

    def below(command: Any, name: str) -> dict[str, Any]:
        inner: dict[str, Any] = getattr(command, "commands", {})
        found = {key: one for word in inner for key, one in below(inner[word], f"{name} {word}".strip()).items()}
        return found or {name: command}

    leaves = below(root, "")
    assert sorted(sections) == sorted(leaves)
    for name, command in leaves.items():
        asked = {option for one in command.params if one.param_type_name == "option" for option in one.opts}
        listed = "\n".join(re.findall(r"^- (?:shared: .*|.*?(?=:))", sections[name], re.MULTILINE))
        assert {"--json", *re.findall(r"`(--?[a-z][a-z-]*)`", listed)} == asked, name


def test_a_stale_reference_is_noticed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = load_script("pages")
    page = tmp_path / "commands.md"
    page.write_text("# Commands\n" + script.MARK)
    monkeypatch.setattr(script, "PAGE", page)
    assert script.main(["--check"]) == 1
    assert "stale" in capsys.readouterr().out
    assert script.main(["--write"]) == 0
    assert script.main(["--check"]) == 0
    assert script.main([]) == 2


def test_every_public_name_has_a_docstring_and_is_in_the_reference_of_the_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = load_script("site")
    assert script.undocumented() == []
    script.write_reference(tmp_path / "python")
    described = "".join(path.read_text(encoding="utf-8") for path in (tmp_path / "python").glob("*.rst"))
    entries = re.findall(r"^\.\. [\w:]+:: fairtrial\.(?:\w+\.)*(\w+)$", described, re.MULTILINE)
    assert {name for _, name, _ in script.public_names()} <= set(entries)
    index = (tmp_path / "python" / "index.rst").read_text(encoding="utf-8")
    said = dict(re.findall(r"^:doc:`([\w.]+)`\n   (\S.*\.)$", index, re.MULTILINE))
    assert list(said) == list(script.MODULES)
    assert said["fairtrial.store"] == "Storage of runs: SQLite, PostgreSQL or memory."
    assert said["fairtrial.store"] in (tmp_path / "python" / "fairtrial.store.rst").read_text(encoding="utf-8")
    monkeypatch.setattr(fairtrial.evaluate, "__doc__", None)
    assert "fairtrial.evaluate" in script.undocumented()


# The examples of prompts, models and agents run as they are.


EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_a_function_is_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    report = load("function", monkeypatch).main()
    assert report.pass_rate == pytest.approx(2 / 3)


@pytest.mark.proves("R66")
def test_a_prompt_is_evaluated_in_two_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    report = load("prompt", monkeypatch).main()
    assert report["brief"].pass_rate == report["thorough"].pass_rate == 1.0


def test_an_agent_with_tools_is_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    report = load("tool_agent", monkeypatch).main()
    assert report.pass_rate == 1.0
    assert report.total_tokens > 0


def test_an_agent_talks_to_the_customers_of_a_shop(monkeypatch: pytest.MonkeyPatch) -> None:
    report = load("shop", monkeypatch).main()
    assert report.errors == {"user_error": 7}
    assert (report.run.planned, sum(result.passed for result in report.results)) == (90, 78)
    assert len({sample.input for sample in load("shop", monkeypatch).CUSTOMERS}) == 30


def test_code_is_tested_in_a_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    report = load("sandboxed_code", monkeypatch).main()
    assert report.pass_rate == 1.0
    assert [call.result for call in report.results[0].session[ToolInvoked].all()] == ["13"]


def test_agents_that_exist_already_are_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    function, endpoint = load("existing_agent", monkeypatch).main()
    assert function.pass_rate == 1.0
    assert endpoint.pass_rate == 0.5
    assert function.total_tokens > 0
    assert endpoint.total_tokens == 30


@pytest.mark.long
@pytest.mark.parametrize("name", ["function", "prompt", "tool_agent", "existing_agent", "sandboxed_code"])
def test_an_example_run_from_the_shell_ends_quietly(name: str) -> None:
    """With warnings on, so that nothing left open goes unnoticed."""
    command = [sys.executable, "-W", "always", str(EXAMPLES / f"{name}.py")]
    ended = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ":".join(sys.path)}
    )
    assert ended.returncode == 0
    assert "95% interval" in ended.stdout
    assert ended.stderr == ""


@pytest.mark.long
@pytest.mark.timeout(900)
def test_an_existing_application_gives_a_first_result_in_five_commands(tmp_path: Path) -> None:
    """From the wheel, in an empty environment."""
    script = load_script("first-result")
    typed = script.first_result(tmp_path, script.build(tmp_path))
    assert [one.line.partition(" --")[0] for one in typed][:3] == ["pip install", "fairtrial init", "fairtrial run"]
    assert len(typed) <= 5
    assert sum(one.seconds for one in typed) <= 600


@pytest.mark.proves("R39")
def test_a_judge_is_checked_and_used(monkeypatch: pytest.MonkeyPatch) -> None:
    checked, report = load("judge", monkeypatch).main()
    assert checked.ok
    assert report.pass_rate == 0.5


def test_an_agent_of_another_framework_is_evaluated_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    report = load("pydantic_ai_agent", monkeypatch).main()
    assert report.pass_rate == 1.0
    assert report.total_tokens > 0


# In a notebook, whose cells run inside an event loop: a real kernel executes what people type there.


SUITE = """
from fairtrial import Dataset, EvalSuite, compare, evaluate, evaluate_sync, exact_match
capitals = Dataset.of({"France": "Paris", "Japan": "Tokyo", "Italy": "Rome", "Peru": "Lima"})
def answer(country):
    return {"France": "Paris"}.get(country, "?")
suite = EvalSuite(name="geography", dataset=capitals, task=answer, evaluator=exact_match)
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlockingKernelClient]:
    """A kernel in a folder of its own, which knows `suite`."""
    with start_kernel(tmp_path_factory.mktemp("notebook")) as client:
        assert execute(client, SUITE) == []
        yield client


@pytest.mark.parametrize("run", ["await evaluate(capitals, answer, exact_match)", "suite.run_sync()"])
def test_a_report_is_shown_as_a_table_and_printed_as_text(kernel: BlockingKernelClient, run: str) -> None:
    [shown] = execute(kernel, f"report = {run}\nreport")
    assert "<table" in shown["text/html"]
    assert shown["text/plain"].endswith(": 4 of 4 trials>")
    assert "25.0%  0.6% to 80.6%  4" in printed(execute(kernel, "print(report)"))


def test_a_comparison_is_shown_as_a_table_and_printed_as_text(kernel: BlockingKernelClient) -> None:
    [shown] = execute(kernel, "both = compare(suite.run_sync(), await suite.run())\nboth")
    assert "<table" in shown["text/html"]
    assert "passed: too few samples to tell" in printed(execute(kernel, "print(both)"))


def test_progress_is_one_line_that_changes(kernel: BlockingKernelClient) -> None:
    outputs = execute(kernel, "_ = await suite.run(store='sqlite:///runs.db', progress=True)")
    assert all(list(output) == ["text/plain"] for output in outputs)
    assert "4 of 4 trials, passed 25.0% [0.6%, 80.6%], no errors" in outputs[-1]["text/plain"]


def test_a_cell_that_defines_the_task_again_starts_another_run(kernel: BlockingKernelClient) -> None:
    known = "def recall(country):\n    return {known}.get(country, '?')\n"
    again = "EvalSuite(name='again', dataset=capitals, task=recall, evaluator=exact_match)"
    rate = f"print({again}.run_sync(store='sqlite:///again.db')['baseline'].pass_rate)"
    assert printed(execute(kernel, known.format(known={"France": "Paris"}) + rate)) == "0.25\n"
    assert printed(execute(kernel, known.format(known={"France": "Paris", "Peru": "Lima"}) + rate)) == "0.5\n"


# The documentation site: every page and every public name, without a warning, without anything from elsewhere.


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built once for all processes of the tests."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "site"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            command = [sys.executable, str(ROOT / "scripts" / "site"), "--output", str(folder)]
            built = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
            assert built.returncode == 0, built.stderr
    return folder / fairtrial.__version__


@pytest.mark.long
class TestSite:
    def test_every_page_of_the_documentation_is_on_it(self, site: Path) -> None:
        pages = {path.relative_to(ROOT).with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
        built = {path.relative_to(site) for path in site.rglob("*.html")}
        assert pages - built == {Path("docs/README.html")}

    def test_every_public_name_has_an_entry(self, site: Path) -> None:
        reference = "".join(path.read_text(encoding="utf-8") for path in (site / "python").glob("*.html"))
        entries = set(re.findall(r'<dt class="[^"]*" id="fairtrial\.([\w.]+)"', reference))
        assert {"EvalSuite", "compare", "EvalReport", "EvalSuite.run_sync"} <= entries
        missing = [name for name in fairtrial.__all__ if not name.startswith("__") and name not in entries]
        assert missing == []

    def test_the_tutorials_are_in_the_order_of_reading(self, site: Path) -> None:
        menu = re.findall(
            r'toctree-l1[^>]*><a [^>]*href="docs/tutorial/([\w-]+)\.html">(\d)', (site / "index.html").read_text()
        )
        read = re.findall(
            r"^\d\. \[[^]]*\]\(tutorial/([\w-]+)\.md\)", (ROOT / "docs" / "README.md").read_text(), re.MULTILINE
        )
        assert menu == [(name, str(number)) for number, name in enumerate(read, 1)]
        assert read[1] == "your-own-suite"

    def test_a_search_from_disk_finds_what_a_search_on_a_server_finds(self, site: Path, page: Page) -> None:
        with served(site.parent) as address:
            found = searched(page, f"{address}/{site.name}", "leaderboard")
            assert any("rank" in excerpt for _, excerpt in found)
            assert searched(page, site.as_uri(), "leaderboard") == found

    def test_a_wrong_address_leads_to_the_start_page_and_to_the_search(self, site: Path, page: Page) -> None:
        with served(site.parent) as address:
            for wrong in (
                f"{site.name}/docs/how-to/nothing.html",
                "0.0.9/index.html",
                "nothing",
                f"{site.name}/404.html",
            ):
                page.goto(f"{address}/{wrong}")
                assert page.get_by_role("heading", level=1).inner_text() == "No such page"
                assert (
                    page.evaluate("getComputedStyle(document.querySelector('ul.search, .wide-search')).display")
                    == "flex"
                )
                page.get_by_role("link", name="Start page").click()
                assert page.url == f"{address}/{site.name}/index.html"
                page.go_back()
                page.get_by_label("words to search for").fill("leaderboard")
                page.get_by_role("button", name="Search").click()
                page.get_by_text("Search finished").wait_for()
                assert page.url.startswith(f"{address}/{site.name}/search.html?q=leaderboard")

    @pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (390, "light")])
    def test_its_pages_fit_a_phone_and_violate_no_rule_of_axe(
        self, site: Path, page: Page, width: int, scheme: Literal["light", "dark"]
    ) -> None:
        axe = (files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")
        page.set_viewport_size({"width": width, "height": 844})
        page.emulate_media(color_scheme=scheme)
        violations: dict[str, list[str]] = {}
        for name in LOOKED_AT:
            page.goto(f"{site.as_uri()}/{name}")
            if "?q=" in name:
                page.get_by_text("Search finished").wait_for()
            assert page.evaluate("document.documentElement.scrollWidth") <= width, name
            page.evaluate(axe)
            found = page.evaluate("async () => (await axe.run(document)).violations")
            if found:
                violations[name] = [f"{one['id']}: {one['nodes'][0]['html'][:160]}" for one in found]
        assert violations == {}


LOOKED_AT = (
    "index.html", "docs/tutorial/first-minutes.html", "docs/how-to/view.html", "python/index.html",
    "python/fairtrial.errors.html", "python/fairtrial.suites.html", "search.html?q=leaderboard", "404.html",
)  # fmt: skip


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        made = browser.new_page()
        made.set_default_timeout(120_000)
        yield made
        browser.close()


class _Host(SimpleHTTPRequestHandler):
    """Files of a folder, and for a wrong address its page 404.html, as hosts of static pages do."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        assert code == 404, (code, message)
        body = Path(self.directory, "404.html").read_bytes()
        self.send_response(404)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Host, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def searched(page: Page, site: str, words: str) -> list[tuple[str, str]]:
    """The titles that a search finds, with their excerpts."""
    page.goto(f"{site}/search.html?q={words}")
    page.get_by_text("Search finished").wait_for()
    page.locator("ul.search p.context").last.wait_for()
    items = page.locator("ul.search li").all()
    wanted = [item for item in items if not item.locator("span", has_text="(Python").count()]
    for item in wanted:
        item.locator("p.context").wait_for()
    return [(item.locator("a").inner_text(), item.locator("p.context").inner_text()) for item in wanted]
