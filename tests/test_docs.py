"""The documentation is true: its code runs and prints what is shown, its links work, and it is complete."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import openai
import pytest
from packaging.requirements import Requirement

from fairtrial import scoring
from fairtrial.integrations.model_server import FaultRule, ModelServer, RateLimited
from tests.doc_pages import PAGES, ROOT, Block, Reader, blocks, commands, differs, routed, steps, unknown_in
from tests.integrations.importers.project import small_project
from tests.redis_server import RedisServer

LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("GITHUB_STEP_SUMMARY", "FAIRTRIAL_MAILBOX", "FAIRTRIAL_CACHE", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    path, modules = list(sys.path), set(sys.modules)
    sys.path.insert(0, str(tmp_path))  # As if Python had been started there.
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def served(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A server where a page speaks to one: a Redis, a model, or a project of OpenAI's hosted Evals."""
    if page.stem == "loops-and-mailboxes":
        with RedisServer(tmp_path_factory.mktemp("redis")) as redis:
            monkeypatch.setenv("REDIS_URL", redis.url)
            yield
        return
    if page == ROOT / "README.md":
        with ModelServer(routed) as server:
            monkeypatch.setenv("OPENAI_BASE_URL", f"{server.base_url}/v1")
            monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
            yield
        return
    if page.stem != "coming-from-openai-evals":
        yield
        return
    project = small_project()
    project.evals[0]["name"] = "Capitals"
    with ModelServer(evals=project, faults=FaultRule(RateLimited(0.01), every=3)) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", f"{server.base_url}/v1")
        monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
        yield


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_everything_on_a_page_runs_and_prints_what_is_shown(
    page: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A module of its own: the classes in a snippet need one that their annotations can be looked up in.
    module = ModuleType(f"snippets_of_{page.stem.lower().replace('-', '_')}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    Reader(page, home, module).follow()
    if isinstance(client := vars(module).get("client"), openai.OpenAI):
        client.close()


def test_the_readme_can_be_read_in_a_few_minutes() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 700
    code = next(block.text for block in blocks(text) if block.kind == "python")
    lines = [line for line in code.splitlines() if line.strip() and not line.startswith(("from ", "import "))]
    assert "OpenAI()" in code
    assert len(lines) <= 8


def test_the_readme_names_every_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    said = (ROOT / "README.md").read_text(encoding="utf-8").partition("Extras:")[2].partition("installs all")[0]
    assert {name for name in project["optional-dependencies"] if f"`{name}`" not in said} == {"all"}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_command_hides_where_nobody_runs_it(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.count("```") == 2 * len(blocks(text))
    outside = re.sub(r"```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"^ {4,}(?:\$ )?(?:fairtrial|pytest) .*", outside, re.MULTILINE) == []


def anchors(page: Path) -> set[str]:
    """The names of a page's headings in addresses."""
    text = re.sub(r"```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", [*PAGES, *sorted(ROOT.glob("[!R]*.md"))], ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"https?:|mailto:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path) if path else page
        assert there.exists(), f"{name_of(page)} links to {target}"
        assert not anchor or anchor in anchors(there), f"{name_of(page)} links to {target}"


def test_every_page_is_in_the_index() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / target).resolve() for target in LINK.findall(index.read_text(encoding="utf-8"))}
    assert [name_of(page) for page in PAGES[1:] if page != index and page not in linked] == []


def test_every_extra_in_an_install_line_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    named = {name for page in PAGES for names in re.findall(r"fairtrial\[([\w,-]+)\]", page.read_text(encoding="utf-8"))
             for name in names.split(",")}  # fmt: skip
    assert "all" in named
    assert named <= set(extras)


def _installed_by(*requirements: str) -> set[str]:
    """The distributions that pip installs for these requirements, by their names in lower case."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found: set[tuple[str, frozenset[str]]] = set()
    todo = [Requirement(line) for line in requirements]
    while todo:
        one = todo.pop()
        name, extras = one.name.lower().replace("_", "-"), frozenset(one.extras)
        if (name, extras) in found:
            continue
        found.add((name, extras))
        lines = importlib.metadata.requires(name) or ()
        if name == "fairtrial":  # What an editable installation has may be old.
            optional = project["optional-dependencies"]
            lines = [*project["dependencies"], *(line for extra in extras for line in optional[extra])]
        for line in map(Requirement, lines):
            if line.marker is None or any(line.marker.evaluate({"extra": extra}) for extra in extras or ("",)):
                todo.append(line)
    return {name for name, _ in found}


def test_the_install_lines_of_the_page_on_traces_have_all_that_its_blocks_import() -> None:
    page = (ROOT / "docs" / "how-to" / "traces.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^\$ pip install (.*)$", page, re.MULTILINE)
    wanted = shlex.split(line)
    assert wanted[0] == "fairtrial[otel]"
    owners = {
        str(file).removesuffix(".py").removesuffix("/__init__").replace("/", "."): name
        for found in importlib.metadata.distributions()
        for name in [found.name.lower()]  # Once: it reads the metadata.
        for file in found.files or ()
        if file.suffix == ".py"
    }
    modules = [
        node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
        for block in blocks(page)
        if block.kind == "python"
        for node in ast.walk(ast.parse(block.text))
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    named = {owners[str(module)] for module in modules if str(module) in owners}
    assert {"openai", "opentelemetry-sdk", "opentelemetry-instrumentation-genai-openai"} <= named
    assert named <= _installed_by(*wanted)
    assert {"opentelemetry-sdk", "opentelemetry-proto"} <= _installed_by("fairtrial[otel]")
    for requirement in wanted[1:]:
        name, _, version = requirement.partition("==")
        assert importlib.metadata.version(name) == version, "the page names the versions that were tested"


def test_every_public_evaluator_is_documented() -> None:
    words = set(re.findall(r"\w+", (ROOT / "docs" / "how-to" / "evaluators.md").read_text(encoding="utf-8")))
    evaluators = {name for name in scoring.__all__ if name.islower()} - {
        "extract_choice",
        "golden_set",
        "replay",
        "resolve",
    }
    assert len(evaluators) > 20
    assert evaluators <= words


def test_the_map_has_every_room_in_the_order_of_imports() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    drawing = text.partition("Nothing imports upwards.")[2].partition("`data` and")[0]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = project["tool"]["importlinter"]["contracts"][0]["layers"]
    assert re.findall(r"^ {4}(\w+(?: \| \w+)?) {2,}\S", drawing, re.MULTILINE) == layers
    rooms = list((ROOT / "src" / "fairtrial").glob("*/__init__.py"))
    assert {path.parent.name for path in rooms} <= {name for layer in layers for name in layer.split(" | ")}
    purposes = {path.parent.name: ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) for path in rooms}
    assert [name for name, purpose in purposes.items() if not (purpose or "").splitlines()[0].endswith(".")] == []


class TestTheReader:
    """What checks the pages is checked itself."""

    PAGE = (
        '```python\nprint("run 0123456789ab took 5 ms")\n```\n\n```text\nrun ba9876543210   took 1.2 s\n```\n'
        "<!-- file: a/b.txt -->\n```text\nhello\n```\n"
        "<!-- not run: needs a queue -->\n```console\n$ fairtrial worker x.py --mailbox redis://queue\n```\n"
        "```console\n$ fairtrial show nothing\n...\n$ echo $?\n2\n```\n"
    )

    def read(self, text: str, home: Path) -> None:
        page = home / "page.md"
        page.write_text(text)
        Reader(page, home, ModuleType("page")).follow()

    def test_a_true_page_passes(self, home: Path) -> None:
        self.read(self.PAGE, home)
        assert (home / "a/b.txt").read_text() == "hello\n"

    @pytest.mark.parametrize(
        ("true", "false", "complaint"),
        [
            ("took 1.2 s", "took long", "shown: +run <id> took long"),
            ("```\n\n```text", "```\n\nwords\n\n```text", "a text block is what"),
            ("--mailbox", "--letterbox", "--letterbox"),
            ("fairtrial worker", "fairtrial wroker", "wroker"),
            ("$ echo $?\n2\n", "", "exits with 2"),
            ("$ echo $?\n2\n", "$ echo $?\n0\n", "shown: +0"),
            ("...\n", "no runs\n", "shown: +no runs"),
            ("$ fairtrial show nothing", "$ rm nothing", "nobody runs 'rm nothing'"),
            ("```python", "```ruby", "nobody checks a block of 'ruby'"),
        ],
    )
    def test_a_page_that_is_not_true_is_found_out(self, home: Path, true: str, false: str, complaint: str) -> None:
        assert true in self.PAGE
        with pytest.raises(AssertionError, match=complaint):
            self.read(self.PAGE.replace(true, false), home)

    def test_lines_left_out_match_as_many_as_there_are(self) -> None:
        assert differs("a\n...\nd", "a\nb\nc\nd\n") is None
        assert differs("a\n...", "a\nb\n") is None
        assert differs("a", "a\nb\n") is not None
        assert differs("a\n...\nx", "a\nb\n") is not None

    def test_a_command_may_take_several_lines(self) -> None:
        block = Block("console", "$ fairtrial run \\\n    --json\nout\n$ cd x\n", 1, "", 0, 0)
        assert [(step.command, step.shown) for step in steps(block)] == [("fairtrial run --json", "out"), ("cd x", "")]

    def test_commands_are_found_in_other_files(self) -> None:
        text = "- run: fairtrial run evals.py\nX=1 fairtrial gate a --margin 0.1  # says\n# fairtrial is good\n"
        assert commands(text) == ["fairtrial run evals.py", "fairtrial gate a --margin 0.1"]
        assert unknown_in("fairtrial store stats --jsn") == ["--jsn"]
        assert unknown_in("fairtrial stor") == ["stor"]
        assert unknown_in("fairtrial --version") == []


def glossary() -> dict[str, str]:
    """The terms of the glossary with their lines."""
    text = (ROOT / "docs" / "reference" / "glossary.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| term ")]
    assert len(rows) > 50
    terms = {row.split(" | ")[0].removeprefix("| "): row for row in rows}
    assert len(terms) == len(rows), "a term is defined twice"
    return terms


def test_every_term_of_the_glossary_is_used_in_code_and_documentation() -> None:
    pages = [page for page in PAGES if page.stem != "glossary"]
    documentation = "\n".join(page.read_text(encoding="utf-8") for page in pages).lower()
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py")).lower()
    for term in glossary():
        for where, text in (("documentation", documentation), ("code", code)):
            assert re.search(rf"(?<!\w){re.escape(term)}", text), f"{term!r} is not used in the {where}"


def test_glossary_lines_are_single_definitions() -> None:
    for term, row in glossary().items():
        assert row.count(" | ") == 1, row
        assert not row.rstrip(" |").endswith("."), f"the definition of {term!r} ends with a full stop"


def test_the_measured_figures_of_the_page_on_capacity_are_those_of_the_results() -> None:
    page = (ROOT / "docs" / "explanation" / "capacity.md").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in (ROOT / "benchmarks/results/capacity.jsonl").read_text().splitlines()]
    fleet = next(row for row in rows if row.get("trials") == 2_000_000)
    stored = next(row for row in rows if "--transcript-bytes" in row["command"])
    deleted = next(row for row in rows if "--delete" in row["command"])
    bare, whole = fleet["bytes_per_trial"], stored["bytes_per_trial"]
    left, reusable = deleted["delete"], deleted["vacuum"]
    low, high = min(fleet["cpu_us_by_100_000"]), max(fleet["cpu_us_by_100_000"])
    lines = [
        *(f"| `{name}`{'' if name != 'details' else ' (output, transcript)'} | {bare[name]:.0f} | {whole[name]:,.0f} |"
          for name in ("results", "details", "samples")),
        f"| together | **{sum(bare.values()):,.0f}** | **{sum(whole.values()):,.0f}** |",
        f"| {fleet['cpu_us']:.0f} us over 2,000,000 trials, {low} to {high:,} us by 100,000 |",
        f"| {fleet['per_second']} on average, beside other work |",
        f"{fleet['worker_kills']} workers and {fleet['client_kills']} clients were killed; all {fleet['stored']:,} ",
        f"| client, killed and started again 10 times | {fleet['client_mb_first']} MB | {fleet['client_mb_peak']} MB |",
        f"| {fleet['worker_mb_first']} MB | {fleet['worker_mb_peak']} MB |",
        f"| Redis | | {fleet['redis_peak_mb']} MB |",
        f"| {fleet['client_mb_report']} MB |",
        f"{fleet['executions']:,} executions",
        f"| after `fairtrial store delete` | {sum(left['mb'].values()):.0f} | {left['seconds']:.0f} |",
        f"| {sum(reusable['mb'].values()):.0f}, the indexes | {reusable['seconds']:.0f} |",
    ]  # fmt: skip
    assert [line for line in lines if line not in page] == []


def test_the_faults_of_the_page_on_capacity_are_those_of_the_results() -> None:
    page = (ROOT / "docs" / "explanation" / "capacity.md").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in (ROOT / "benchmarks/results/capacity.jsonl").read_text().splitlines()]
    hours = [next(row for row in rows if row["command"] == f"fleet_soak.py --engine {engine} --minutes 60")
             for engine in ("one-transaction", "redis")]  # fmt: skip
    restarts = [next(row for row in rows if row["command"].startswith(f"fleet_soak.py --engine {engine} --trials "))
                for engine in ("redis", "postgresql", "sqs")]  # fmt: skip
    one, redis = (row["faults"] for row in hours)
    killed, frozen, cut = "worker killed", "worker frozen beyond its lease", "three connections terminated"
    store, queue = "store killed with all its children", "queue killed"
    memory = [[str(at["worker_mb"]) for at in row["memory"] if at["minute"] in (1, 10, 30, 60)] for row in hours]
    tables = [
        ("workers killed, and frozen beyond their lease",
         *(f"{row[killed]} and {row[frozen]}" for row in (one, redis))),
        ("clients killed", one["client killed"], redis["client killed"]),
        ("the database killed with all its children; Redis killed", one[store], f"{redis[store]} and {redis[queue]}"),
        ("three connections terminated at a time", f"{one[cut]} times", f"{redis[cut]} times"),
        ("runs, and trials stored",
         *(f"{row['runs']}, and {row['stored']:,} of {10_000 * row['runs']:,}" for row in hours)),
        ("executions beyond one per trial",
         *(f"{row['extra_executions']:,} ({row['extra_share']:.1%})" for row in hours)),
        ("MB of a worker that was never killed after 1, 10, 30 and 60 min", *map(", ".join, memory)),
        ("trials stored, each once", *(f"{row['stored']:,}" for row in restarts)),
        ("workers, and clients killed", *(f"{row['worker_kills']} and {row['client_kills']}" for row in restarts)),
        ("requests lost and sent again", *(row["resent"] for row in restarts)),
        ("executions beyond one per trial",
         *(f"{row['executions'] - row['stored']:,} ({row['extra_executions']:.1%})" for row in restarts)),
        ("dead letters", *(row["dead_letters"] for row in restarts)),
    ]  # fmt: skip
    assert [row for row in tables if f"| {' | '.join(map(str, row))} |" not in page] == []
