"""Tasks of a platform engineer."""

from __future__ import annotations

import csv
import json
import re
import signal
import time
import urllib.error
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from http.cookiejar import CookieJar

from tests.first_hour.person import ROOT, Person, Started, task
from tests.servers import free_port

SUITE = """
import time

from fairtrial import Dataset, EvalSuite, exact_match


def double(number: int) -> int:
    with open("executed.log", "a") as log:
        log.write(f"{number}\\n")
    time.sleep(SECONDS)
    if number % 86 == 0:
        raise ValueError("the provider's answer makes no sense")
    return 2 * number


suite = EvalSuite("doubles", Dataset.of({number: 2 * number for number in range(1, COUNT + 1)}), double, exact_match)
"""


def write_suite(person: Person, count: int, seconds: float) -> None:
    person.write("evals.py", SUITE.replace("COUNT", str(count)).replace("SECONDS", str(seconds)))


def executed(person: Person) -> list[str]:
    log = person.folder / "executed.log"
    return log.read_text().split() if log.exists() else []


def with_database(person: Person) -> None:
    person.variables["DATABASE"] = person.world.database()


def stored_run(person: Person, count: int = 60) -> None:
    """A finished run in a database."""
    with_database(person)
    write_suite(person, count, 0)
    person.type("fairtrial run evals.py --store $DATABASE --quiet")


@task(
    "C1",
    wants="to know before the first run whether database and queue are fit for it, and who will store results",
    outcome="`doctor` names what is missing before and confirms after; workers store results themselves",
    pages=("README.md", "docs/how-to/fleet-on-postgresql.md"),
)
def doctor(person: Person) -> None:
    with_database(person)
    write_suite(person, 20, 0)
    before = person.type("fairtrial doctor --store $DATABASE --mailbox $DATABASE")
    assert "PostgreSQL" in before, before
    with person.start("fairtrial worker evals.py --mailbox $DATABASE") as worker:
        person.type("fairtrial run evals.py --store $DATABASE --mailbox $DATABASE")
        assert worker.end() == 0, worker.screen()
    after = person.type("fairtrial doctor --store $DATABASE --mailbox $DATABASE")
    assert re.search(r"results .*workers", after), after
    assert "store-test-password" not in before + after


@task(
    "C2",
    wants="six hundred trials by two workers, with PostgreSQL as store and queue",
    outcome="600 of 600 stored, once each; the 7 that raise are counted as errors; both workers took part",
)
def two_workers(person: Person) -> None:
    with_database(person)
    write_suite(person, 602, 0.02)
    with (
        person.start("fairtrial worker evals.py --mailbox $DATABASE --name one --concurrency 8") as one,
        person.start("fairtrial worker evals.py --mailbox $DATABASE --name two --concurrency 8") as two,
    ):
        screen = person.type("fairtrial run evals.py --store $DATABASE --mailbox $DATABASE")
        for worker in (one, two):
            assert worker.end() == 0, worker.screen()
            assert re.search(r"ended: [1-9]\d* received", worker.screen()), worker.screen()
    assert re.search(r"7 x (task error: )?ValueError", screen), screen
    assert len(executed(person)) == len(set(executed(person))) == 602
    report = json.loads(person.type("fairtrial show doubles --store $DATABASE --json"))
    counts = report["experiments"][0]["trials"]
    assert (counts["scored"], counts["task_error"]) == (595, 7), counts


@task(
    "C3",
    wants="colleagues to read reports with a role that may only SELECT",
    outcome="runs, reports, single trials and exports work; a run with that role is refused in one sentence",
)
def read_only_role(person: Person) -> None:
    stored_run(person)
    person.variables["READER"] = person.world.reader(person.variables["DATABASE"])
    assert "doubles@1" in person.type("fairtrial runs --store $READER")
    assert "100.0%" in person.type("fairtrial show doubles --store $READER")
    person.type("fairtrial export doubles --store $READER --output doubles.csv")
    with (person.folder / "doubles.csv").open(newline="") as file:
        (row,) = [row for row in csv.DictReader(file) if row["input"] == "7"]
    screen = person.type(f"fairtrial show doubles --store $READER --sample {row['sample_id']}")
    assert re.search(r"output +14\b", screen), screen
    refused = person.type("fairtrial run evals.py --store $READER", 2)
    assert "permission denied" in refused or "may not" in refused or "right" in refused, refused
    assert len(refused.splitlines()) <= 6, refused


def sign_in(address: str, token: str) -> urllib.request.OpenerDirector:
    """Sign in as a browser does: by the form of the page."""
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
    opener.addheaders = [("Accept", "text/html")]
    try:
        page = opener.open(address, timeout=60).read().decode()
    except urllib.error.HTTPError as error:  # 401, with the form.
        page = error.read().decode()
    action = re.search(r'<form[^>]*action="([^"]*)"', page)
    assert action is not None, page
    hidden = dict(re.findall(r'<input[^>]*type="hidden"[^>]*name="([^"]+)"[^>]*value="([^"]*)"', page))
    body = urllib.parse.urlencode({**hidden, "token": token}).encode()
    request = urllib.request.Request(urllib.parse.urljoin(address, action[1]), body)
    request.add_header("Origin", "http://" + urllib.parse.urlparse(address).netloc)
    opener.open(request, timeout=60).read()
    return opener


def viewer_of(viewer: Started) -> str:
    return viewer.wait_for(r"open (http://\S+)")[1].rstrip("/")


@task(
    "C4",
    wants="forty colleagues to read reports at the same time",
    outcome="forty sign in and read two hundred pages; every one is answered",
    pages=("docs/how-to/view.md",),
)
def forty_readers(person: Person) -> None:
    stored_run(person)
    person.variables["READER"] = person.world.reader(person.variables["DATABASE"])
    person.variables["FAIRTRIAL_VIEW_TOKEN"] = "a-token-for-the-whole-team"
    with person.start(f"fairtrial view --store $READER --no-browser --port {free_port()}") as viewer:
        home = viewer_of(viewer)

        def read(number: int) -> list[int]:
            opener = sign_in(f"{home}/", "a-token-for-the-whole-team")
            pages = ("", "doubles@1", "doubles@1/trials", "doubles@1/trials?outcome=failed", "history?suite=doubles")
            return [opener.open(f"{home}/{page}", timeout=120).status for page in pages]

        with ThreadPoolExecutor(40) as pool:
            statuses = [status for answers in pool.map(read, range(40)) for status in answers]
        assert statuses == [200] * 200
        assert "token-for-the-whole-team" not in viewer.screen()


@task(
    "C5",
    wants="a run to survive Ctrl-C, a second Ctrl-C, SIGTERM and kill -9",
    outcome="each time the same command goes on from what was stored; no stored trial is executed again",
)
def interruptions(person: Person) -> None:
    write_suite(person, 40, 0.15)
    line = "fairtrial run evals.py --concurrency 2"
    stored = 0
    for signals in ((signal.SIGINT,), (signal.SIGINT, signal.SIGINT), (signal.SIGTERM,), (signal.SIGKILL,)):
        before = len(executed(person))
        with person.start(line) as run:
            _wait(lambda before=before: len(executed(person)) >= before + 6)
            for number in signals[:-1]:
                run.process.send_signal(number)
                time.sleep(0.2)
            code = run.end(signals[-1])
        if signals[0] == signal.SIGINT:
            assert code == 130, (code, run.screen())
            assert run.screen().strip().splitlines()[-1].strip().endswith(line), run.screen()
        runs = json.loads(person.type("fairtrial runs --json"))
        (only,) = runs["runs"] if isinstance(runs, dict) else runs
        assert only["status"] in ("interrupted", "running"), only
        now = only["experiments"][0]["trials"]
        assert now > stored, (now, stored)
        stored = now
    screen = person.type(line)
    assert re.search(r"\b100.0% .* 40 +0\b", screen), screen
    again = len(executed(person)) - len(set(executed(person)))
    assert again <= 2 * 4, f"{again} trials were executed again, more than were in flight at the four interruptions"


def _wait(ready: object, seconds: float = 300) -> None:
    assert callable(ready)
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@task(
    "C6",
    wants="two schedulers that start the same run at the same moment not to pay twice",
    outcome="six samples, six executions; both commands print the report",
)
def started_twice(person: Person) -> None:
    write_suite(person, 6, 0.3)
    line = "fairtrial run evals.py --once nightly-7"
    with person.start(line) as first, person.start(line) as second:
        assert first.process.wait(timeout=300) == 0, first.screen()
        assert second.process.wait(timeout=300) == 0, second.screen()
        assert "100.0%" in first.screen()
        assert "100.0%" in second.screen()
    assert len(executed(person)) == 6


@task(
    "C7",
    wants="to take a worker away during a run, and to add one",
    outcome="SIGTERM lets it finish what it holds and end with 0; the run ends complete with the other worker",
)
def drained_worker(person: Person) -> None:
    with_database(person)
    write_suite(person, 80, 0.2)
    with person.start("fairtrial worker evals.py --mailbox $DATABASE --concurrency 2") as leaving:
        with person.start("fairtrial run evals.py --store $DATABASE --mailbox $DATABASE") as run:
            _wait(lambda: len(executed(person)) >= 6)
            with person.start("fairtrial worker evals.py --mailbox $DATABASE --concurrency 8"):
                assert leaving.end() == 0, leaving.screen()
                assert run.process.wait(timeout=120) == 0, run.screen()
        assert re.search(r"\b80 (samples|of 80 trials)", run.screen()), run.screen()
    assert len(executed(person)) == len(set(executed(person))) == 80


@task(
    "C8",
    wants="to see what a shared queue holds and what died in it, without knowing the suites",
    outcome="`fleet` and `fleet dlq` show the suite, its workers and its dead letter from the address of the queue",
)
def queue_alone(person: Person) -> None:
    person.variables["QUEUE"] = person.world.redis()
    person.write(
        "evals.py",
        """
import os

from fairtrial import Dataset, EvalSuite, exact_match


def double(number: int) -> int:
    if number == 7:
        os._exit(1)
    return 2 * number


suite = EvalSuite("deadly", Dataset.of({number: 2 * number for number in range(20)}), double, exact_match)
""",
    )
    worker = (
        "bash -c 'while true; do fairtrial worker evals.py --mailbox $QUEUE --lease 2 --concurrency 4 --quiet; done'"
    )
    with person.start(worker) as loop:
        screen = person.type("fairtrial run evals.py --mailbox $QUEUE")
        assert "dead" in screen, screen
        elsewhere = Person(person.world, person.folder / "desk", person.read, person.commands, person.variables)
        elsewhere.folder.mkdir()
        screen = elsewhere.type("fairtrial fleet --mailbox $QUEUE")
        assert "deadly" in screen, screen
        screen = elsewhere.type("fairtrial fleet dlq list --mailbox $QUEUE")
        assert "deadly" in screen, screen
        loop.end(signal.SIGKILL)


@task(
    "C9",
    wants="links to results that colleagues can open, today and after the viewer's restart",
    outcome="a link asks a new colleague for the token and then shows the page; after a restart nobody signs in again",
)
def restart(person: Person) -> None:
    stored_run(person)
    token = "a-token-for-the-whole-team"
    person.write("token", token + "\n").chmod(0o600)
    line = f"fairtrial view --store $DATABASE --no-browser --port {free_port()} --token-file token"
    person.variables["XDG_CACHE_HOME"] = str(person.folder / "cache")
    colleague = person.world.browser().new_context().new_page()
    with person.start(line) as viewer:
        link = f"{viewer_of(viewer)}/doubles@1/trials"
        colleague.goto(link)
        assert "doubles" not in colleague.title() or "sign in" in colleague.inner_text("body").lower()
        colleague.fill("input[name=token]", token)
        with colleague.expect_navigation():
            colleague.keyboard.press("Enter")
        assert colleague.url == link
        assert "60" in colleague.inner_text("body")
        assert viewer.end() == 0, viewer.screen()
    with person.start(line) as viewer:
        assert viewer_of(viewer) in link
        answer = colleague.goto(link)
        assert answer.status == 200
        assert "60" in colleague.inner_text("body")
    colleague.context.close()


@task(
    "C10",
    wants="to find the runs of one branch among those that CI stored",
    outcome="tags are in the list on the command line and in the browser, and both filter by one",
)
def tags(person: Person) -> None:
    with_database(person)
    write_suite(person, 10, 0)
    for branch in ("main", "faster"):
        person.type(f"fairtrial run evals.py --store $DATABASE --quiet --tag branch={branch} --tag commit=1a2b3c4")
    screen = person.type("fairtrial runs --store $DATABASE --tag branch=faster")
    assert "doubles@2" in screen
    assert "doubles@1" not in screen
    person.variables["FAIRTRIAL_VIEW_TOKEN"] = "a-token-for-the-whole-team"
    with person.start(f"fairtrial view --store $DATABASE --no-browser --port {free_port()}") as viewer:
        home = viewer_of(viewer)
        page = person.world.browser().new_context().new_page()
        page.goto(f"{home}/")
        page.fill("input[name=token]", "a-token-for-the-whole-team")
        page.keyboard.press("Enter")
        page.get_by_role("link", name="branch=faster").first.click()
        page.wait_for_url("**tag=**")
        screen = page.locator("table").first.inner_text()
        assert "doubles@2" in screen, screen
        assert "doubles@1" not in screen, screen
        page.context.close()


@task(
    "C11",
    wants="to order machines for ten million trials a week and forty people, and files to deploy the viewer with",
    outcome="a page goes from these numbers to workers, database, viewer and cost; the wheel has the files' options",
    pages=("docs/explanation/capacity.md",),
)
def sizing(person: Person) -> None:
    page = " ".join(person.read.split())
    assert "10 million trials a week" in page or "10,000,000 trials a week" in page
    program = re.search(r"```python\n((?:(?!```).)*dollars a month(?:(?!```).)*)```", person.read, re.DOTALL)
    assert program is not None
    person.write("size.py", program[1])
    person.write("capacity.jsonl", (ROOT / "benchmarks/results/capacity.jsonl").read_text())  # The page links it.
    assert re.search(r"dollars a month.* [\d,]+$", person.type("python size.py"), re.MULTILINE)
    known = person.type("fairtrial view --help")
    files = [path for path in sorted((ROOT / "deploy").iterdir()) if "view" in path.name]
    assert files, "no file of deploy/ is about the viewer"
    for path in files:
        text = path.read_text()
        for option in re.findall(r"--[a-z-]+", "".join(re.findall(r"fairtrial view[^\n]*|args:[^\]]*\]", text))):
            assert option in known, (path.name, option)
        assert path.name in person.read, f"{path.name} is on no page that was read"
