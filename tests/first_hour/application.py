"""Tasks of an application developer."""

from __future__ import annotations

import csv
import json
import re
import signal
import xml.etree.ElementTree
from collections.abc import Iterator
from contextlib import contextmanager

from tests.first_hour.person import Person, task
from tests.servers import free_port

APPLICATION = """
from fastapi import FastAPI
from openai import AsyncOpenAI
from pydantic import BaseModel

app = FastAPI()
client = AsyncOpenAI()


class Ticket(BaseModel):
    text: str


async def classify(text: str, hint: str = "") -> str:
    reply = await client.responses.create(model="gpt-6.1-sol", input=hint + text)
    return reply.output_text


@app.post("/classify")
async def endpoint(ticket: Ticket) -> dict[str, str]:
    return {"label": await classify(ticket.text)}
"""
TOPICS = {"billing": "an invoice", "shipping": "a parcel", "account": "my password"}
# Urgent tickets are answered wrongly, unless the prompt says how to choose.
PROVIDER: dict[str, object] = {
    "replies": [
        {"when": "^Ticket.*urgent", "reply": "other"},
        *({"when": words, "reply": topic} for topic, words in TOPICS.items()),
    ]
}
SUITE = """
from app import classify, client

from fairtrial import Dataset, EvalSuite, Experiment, exact_match
from fairtrial.integrations.tracing import record_openai

record_openai(client)


async def answer(text, ctx):
    return await classify(text, **ctx.experiment.params)


suite = EvalSuite(
    name="tickets",
    dataset=Dataset.load("tickets.csv", str, str, columns={"input": "ticket", "expected": "team"}),
    task=answer,
    evaluator=exact_match,
    experiments=[Experiment("plain"), Experiment("hinted", params={"hint": "Choose one team. "})],
)
"""


@contextmanager
def application(person: Person) -> Iterator[None]:
    """What the developer has before the first command: a service, sixty labelled tickets, a provider."""
    person.write("app.py", APPLICATION)
    topics = list(TOPICS)
    with (person.folder / "tickets.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["number", "ticket", "team", "channel"])
        for number in range(60):
            topic = topics[number % 3]
            urgent = " It is urgent." if number % 4 == 0 else ""
            rows.writerow(
                [number, f"Ticket {number}: about {TOPICS[topic]}.{urgent}", topic, "mail" if number % 2 else "chat"]
            )
    with person.provider(PROVIDER):
        yield


@task(
    "A1",
    wants="to see in five minutes, without a key, what the tool does",
    outcome="a demo runs, says how the two experiments differ and which trials failed, and a gate decides",
    pages=("README.md",),
)
def quick_start(person: Person) -> None:
    screen = person.type("fairtrial init demo")
    assert "fairtrial run" in screen
    person.folder /= "demo"
    screen = person.type("fairtrial run")
    assert "76.9%" in screen
    assert "89.7%" in screen
    assert "no detectable difference" in person.type("fairtrial compare support:baseline support:careful")
    person.type("fairtrial gate support:careful --baseline support:baseline --margin 0.02", 3)


@task(
    "A2",
    wants="an async function of an existing FastAPI service evaluated on sixty rows of a CSV file with column names of "
    "its own, with two prompts",
    outcome="120 trials, 45 of 60 and 60 of 60 right, and a sentence that says which prompt is better",
)
def existing_function(person: Person) -> None:
    with application(person):
        assert "app.py" in person.type("fairtrial init")
        assert 'columns={"input": "ticket"}' in person.look_at("evals.py")
        person.write("evals.py", SUITE)
        screen = person.type("fairtrial run")
        assert "75.0%" in screen
        assert "100.0%" in screen
        assert "hinted is better than plain" in screen or "hinted is better than plain" in person.type(
            "fairtrial compare tickets:plain tickets:hinted"
        )


@task(
    "A3",
    wants="the tokens of the service's own OpenAI calls in the report, without changing the service",
    outcome="the report counts the tokens of 120 calls, and a trial shows the messages",
)
def own_tokens(person: Person) -> None:
    with application(person):
        person.write("evals.py", SUITE)
        person.type("fairtrial run evals.py --quiet")
        person.type("fairtrial export tickets --output tickets.jsonl")
        rows = [json.loads(line) for line in (person.folder / "tickets.jsonl").read_text().splitlines()]
        assert len(rows) == 120
        assert all(row["tokens"] > 0 for row in rows), rows
        screen = person.type(f"fairtrial show tickets:plain --sample {rows[0]['sample_id']}")
        assert "gpt-6.1-sol" in screen, screen
        assert f"user  {rows[0]['input']}" in screen, screen


@task(
    "A4",
    wants="the running service tested over HTTP, as its callers use it",
    outcome="45 of 60 right, the same as by calling the function",
)
def running_service(person: Person) -> None:
    port = free_port()
    with application(person), person.start(f"uvicorn app:app --port {port}") as service:
        service.wait_for("Uvicorn running")
        person.write(
            "evals.py",
            f"""
import json
from urllib.request import Request, urlopen

from fairtrial import Dataset, EvalSuite, exact_match


def over_http(text: str) -> str:
    body = json.dumps({{"text": text}}).encode()
    with urlopen(Request("http://127.0.0.1:{port}/classify", body, {{"content-type": "application/json"}})) as answer:
        return json.load(answer)["label"]


tickets = Dataset.load("tickets.csv", str, str, columns={{"input": "ticket", "expected": "team"}})
suite = EvalSuite("service", tickets, over_http, exact_match)
""",
        )
        screen = person.type("fairtrial run evals.py")
        assert "75.0%" in screen
        assert service.end(signal.SIGINT) == 0


@task(
    "A5",
    wants="to see at once what was asked, what came back and why it is wrong",
    outcome="the report of a run fits 25 lines of 80 columns and has wrong rows with input, output and reason",
)
def rows_at_once(person: Person) -> None:
    with application(person):
        person.write("evals.py", SUITE)
        screen = person.type("fairtrial run evals.py 2>/dev/null")
    lines = screen.splitlines()
    assert max(map(len, lines)) <= 80, screen
    assert len(lines) <= 25, f"{len(lines)} lines:\n{screen}"
    assert "Ticket 0: about an invoice" in screen, screen
    assert "other" in screen
    assert "billing" in screen


@task(
    "A6",
    wants="one wrong answer in full, and that trial alone again",
    outcome="input, expected value, output, reason and messages; the printed command runs one trial",
)
def one_trial(person: Person) -> None:
    with application(person):
        person.write("evals.py", SUITE)
        person.type("fairtrial run evals.py --quiet")
        screen = person.type("fairtrial trials tickets --failed")
        offered = re.search(r"^  (fairtrial show \S+ --sample \S+)", screen, re.MULTILINE)
        assert offered is not None, screen
        screen = person.type(offered[1])
        assert "urgent" in screen
        assert re.search(r"expected +(billing|shipping|account)", screen), screen
        assert re.search(r"output +other", screen), screen
        again = re.search(r"^again +(.+)$", screen, re.MULTILINE)
        assert again is not None, screen
        screen = person.type(again[1])
        assert re.search(r"\b1 sample\b|\b1 of 1 trials", screen), screen


@task(
    "A7",
    wants="to stop paying when the suite has a typo after the paid call, then to fix it and go on",
    outcome="the run ends early with the line of the mistake; after the fix the same run is finished, and nothing says "
    "that it mixes two versions of the code",
)
def typo(person: Person) -> None:
    with application(person):
        person.write(
            "evals.py",
            SUITE.replace(
                "return await classify(text, **ctx.experiment.params)", "return (await classify(text)).texxt"
            ),
        )
        screen = person.type("fairtrial run evals.py --concurrency 4", 4)
        assert "AttributeError" in screen
        assert "evals.py:10" in screen, screen
        counts = [one["trials"] for one in json.loads(person.type("fairtrial show tickets --json"))["experiments"]]
        assert 0 < sum(one["task_error"] for one in counts) < 60, counts
        person.write("evals.py", SUITE)
        screen = person.type("fairtrial run evals.py --resume errors")
        assert "75.0%" in screen
        screen = person.type("fairtrial show tickets")
        assert "two code versions" not in screen, screen


RAG = """
from fairtrial import Dataset, EvalSuite, TrialContext
from fairtrial.data.session import Retrieved
from fairtrial.models import OpenAIAdapter
from fairtrial.models.judges import faithfulness


def answer(question: str, ctx: TrialContext) -> str:
    ctx.session.record(Retrieved(question, ["The bridge opened in 1932."]))
    return "The bridge opened in 1850 and was painted blue by Napoleon."


bridges = Dataset.of({f"When did bridge {n} open?": "In 1932." for n in range(20)}, name="bridges")
suite = EvalSuite("rag", bridges, answer, faithfulness(OpenAIAdapter("judge", api="chat")))
"""


def _first_sample(person: Person, run: str) -> str:
    """The id of a sample, as the list of failed trials offers it."""
    offered = re.search(r"--sample (\S+)", person.type(f"fairtrial trials {run} --failed"))
    assert offered is not None, person.read
    return offered[1]


@task(
    "A8",
    wants="to know whether the answers of a RAG application follow from its documents",
    outcome="an invented answer fails with its unsupported claim; with a judge that finds no claim, nothing passes",
)
def retrieval(person: Person) -> None:
    person.type("fairtrial init example --template rag")
    person.look_at("example/evals.py")
    person.write("evals.py", RAG)
    claims = [
        {"claim": "The bridge opened in 1850.", "reason": "The document says 1932.", "supported": "no"},
        {"claim": "It was painted blue.", "reason": "No document says so.", "supported": "no"},
    ]
    with person.provider({"replies": [{"when": "", "reply": json.dumps({"claims": claims})}]}):
        screen = person.type("fairtrial run evals.py")
        assert "0.0%" in screen
        screen = person.type("fairtrial show rag --sample " + _first_sample(person, "rag"))
        assert "not supported: The bridge opened in 1850." in screen, screen
    with person.provider({"replies": [{"when": "", "reply": json.dumps({"claims": []})}]}):
        screen = person.type("fairtrial run evals.py", 4)
        assert "100.0%" not in screen, screen
        assert "statement" in screen or "claim" in screen, screen


@task(
    "A9",
    wants="to notice rows of the file that have no right answer",
    outcome="they are not scored and not counted as wrong, and the report says how many and why",
)
def missing_references(person: Person) -> None:
    with application(person):
        rows = (person.folder / "tickets.csv").read_text().splitlines()
        rows[1:7] = [re.sub(",(billing|shipping|account),", ",,", row) for row in rows[1:7]]
        person.write("tickets.csv", "\n".join(rows) + "\n")
        person.write("evals.py", SUITE)
        screen = person.type("fairtrial run evals.py")
        assert len(re.findall(r"^(?:plain|hinted) .* 54 +6 ", screen, re.MULTILINE)) == 2, screen
        assert re.search(r"^12 x .*the sample has no expected value", screen, re.MULTILINE), screen
        report = json.loads(person.type("fairtrial show tickets --json"))
        counts = [one["trials"] for one in report["experiments"]]
        assert [(one["scored"], one["scorer_error"]) for one in counts] == [(54, 6), (54, 6)], counts


@task(
    "A10",
    wants="a test that fails when the answers get worse, alone and with several processes",
    outcome="one test passes and one fails, with the same verdicts under `-n 2`",
    pages=("docs/how-to/tests-and-ci.md",),
)
def tests(person: Person) -> None:
    with application(person):
        person.write("evals.py", SUITE)
        person.write(
            "test_evals.py",
            """
from evals import suite

from fairtrial.testing import assert_eval


def test_hinted():
    assert_eval(suite, floor=0.9, experiment="hinted")


def test_plain():
    assert_eval(suite, floor=0.9, experiment="plain")
""",
        )
        for line in ("pytest -q", "pytest -q -n 2"):
            screen = person.type(line, 1)
            assert "1 failed, 1 passed" in screen, screen
            assert re.search(r"^pass +tickets \[hinted\]  pass rate 100.0%", screen, re.MULTILINE), screen
            assert re.search(r"^fail +tickets \[plain\]  pass rate 75.0%", screen, re.MULTILINE), screen


@task(
    "A11",
    wants="a gate and its reports in CI: a summary for people, files for other tools",
    outcome="exit codes 0, 1 and 3 for pass, fail and too little data; JUnit, Markdown, HTML, CSV and Parquet files "
    "that other programs read, with 120 trials each",
)
def gate_in_ci(person: Person) -> None:
    with application(person):
        person.write("evals.py", SUITE)
        person.type("fairtrial run evals.py --quiet")
    person.type("fairtrial gate tickets:hinted --floor passed=0.9")
    person.type("fairtrial gate tickets:plain --floor passed=0.9", 1)
    person.type("fairtrial gate tickets:plain --floor passed=0.75", 3)
    for name in ("evals.xml", "evals.md", "evals.html", "evals.csv", "evals.parquet"):
        person.type(f"fairtrial export tickets --output {name}")
    junit = xml.etree.ElementTree.parse(person.folder / "evals.xml").getroot()
    assert len(junit.findall(".//testcase")) == 120
    assert len(junit.findall(".//failure")) == 15
    assert "| plain" in (person.folder / "evals.md").read_text()
    with (person.folder / "evals.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 120, rows[:1]
    import pyarrow.parquet

    assert pyarrow.parquet.read_table(person.folder / "evals.parquet").num_rows == 120
    page = person.world.browser().new_page()
    page.goto((person.folder / "evals.html").as_uri())
    assert "hinted is better than plain" in page.inner_text("body")
    page.close()


@task(
    "A12",
    wants="to look at the answers on a phone, and at both prompts side by side",
    outcome="at 390 pixels the filters stand above the rows, and input and output are in view; a page has samples as "
    "rows and experiments as columns",
    pages=("docs/how-to/view.md",),
)
def phone(person: Person) -> None:
    with application(person):
        person.write("evals.py", SUITE)
        person.type("fairtrial run evals.py --quiet")
    with person.start(f"fairtrial view tickets --no-browser --port {free_port()}") as viewer:
        address = viewer.wait_for(r"open (http://\S+)")[1]
        token = viewer.wait_for(r"token (\S+)")[1]
        context = person.world.browser().new_context(viewport={"width": 390, "height": 844})
        page = context.new_page()
        page.goto(address)
        page.fill("input[name=token]", token)
        with page.expect_navigation():
            page.keyboard.press("Enter")
        home = address.partition("/tickets")[0].rstrip("/")
        page.goto(f"{home}/tickets@1/trials")
        table = page.locator("table").first.bounding_box()
        page.locator("summary", has_text=re.compile("filter", re.IGNORECASE)).first.click()
        box = page.locator("input[type=search]").first.bounding_box()
        assert box is not None
        assert table is not None
        assert box["y"] < table["y"] + 50, (box, table)
        screen = page.inner_text("body")
        assert "Ticket" in screen
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        page.goto(f"{home}/tickets@1")
        page.locator("a[href*=matrix]").first.click()
        page.wait_for_load_state()
        screen = page.inner_text("body")
        assert "plain" in screen
        assert "hinted" in screen
        assert "other" in screen
        context.close()
        assert viewer.end(signal.SIGINT) == 0, viewer.screen()
