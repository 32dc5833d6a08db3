"""Tasks of a researcher."""

from __future__ import annotations

import csv
import json
import math
import random
import re
import zipfile

from tests.first_hour.person import Person, task

# Three systems on twelve passages with five questions each; a repeat of a question draws anew.
BENCHMARK = """
import random
from collections import defaultdict
from itertools import count

from fairtrial import Dataset, EvalSuite, Experiment, Sample, TrialContext, exact_match

SKILL = {"small": 0.4, "medium": 0.74, "large": 0.84}
calls = defaultdict(lambda: count(1))


def answer(question: str, ctx: TrialContext) -> str:
    name = ctx.experiment.name
    number = next(calls[name, question])  # At once: repeats run beside each other.
    with open("calls.log", "a") as log:
        log.write(f"{name} {question}\\n")
    passage = question.split()[0]
    level = SKILL[name] + random.Random(passage).uniform(-0.15, 0.15)
    right = random.Random(f"{name} {question} {number}").random() < level
    return question.upper() if right else "unknown"


questions = [f"p{passage:02} question {number}" for passage in range(12) for number in range(5)]
samples = [Sample(text.replace(" ", "-"), text, text.upper(), {"passage": text.split()[0]}) for text in questions]
suite = EvalSuite(
    name="bench",
    dataset=Dataset(samples, name="reading"),
    task=answer,
    evaluator=exact_match,
    experiments=[Experiment(name) for name in SKILL],
)
"""


def with_rule(rule: str) -> str:
    """The benchmark with an evaluator of its own."""
    function = f"def judge(output: str, expected: str) -> bool:\n    return {rule}\n\n\nSKILL ="
    text = BENCHMARK.replace(", exact_match", "").replace("exact_match", "judge")
    return text.replace("SKILL =", function, 1)


def benchmark(person: Person, *, run: bool = True) -> None:
    person.write("bench.py", BENCHMARK)
    if run:
        person.type("fairtrial run bench.py --repeats 3 --quiet")


@task(
    "B1",
    wants="three systems on sixty questions, three times each, with pass@k",
    outcome="540 trials; samples and trials counted apart; pass@k and pass^k for k up to 3 with intervals",
    pages=("README.md", "docs/explanation/reports.md"),
)
def repeats(person: Person) -> None:
    benchmark(person, run=False)
    person.type("fairtrial run bench.py --repeats 3")
    screen = person.type("fairtrial show bench --full")
    assert all(name in screen for name in ("pass@2", "pass@3", "pass^2", "pass^3")), screen
    assert re.search(r"\b60 +180\b", screen), screen


@task(
    "B2",
    wants="to know before paying how many questions show a difference of ten points",
    outcome="a number of samples and trials, for several numbers of repeats",
)
def plan(person: Person) -> None:
    benchmark(person)
    screen = person.type("fairtrial plan bench --difference 0.1")
    assert re.search(r"About [\d,]+ samples with \d repeats?", screen), screen
    assert "trials" in screen


@task(
    "B3",
    wants="the same outputs scored by another rule, without calling the systems again",
    outcome="540 trials scored again, no system called, and the two scorings can be compared",
)
def rescore(person: Person) -> None:
    benchmark(person)
    calls = (person.folder / "calls.log").read_text()
    person.write("bench.py", with_rule("len(output) >= len('unknown')"))
    screen = person.type("fairtrial rescore bench bench.py")
    assert "no task was called" in screen, screen
    assert (person.folder / "calls.log").read_text() == calls
    assert "100.0%" in person.type("fairtrial show bench@2:small")
    person.type("fairtrial compare bench@1:small bench@2:small")


@task(
    "B4",
    wants="to know what a lenient judge's pass rate is worth, from forty labels by people",
    outcome="agreement, sensitivity, and the rate that people would give, whose interval holds the truth",
)
def calibrate(person: Person) -> None:
    person.write("bench.py", with_rule("output == expected or expected[2] in '02468'"))
    person.type("fairtrial run bench.py --quiet")
    person.type("fairtrial export bench --output bench.csv")
    with (person.folder / "bench.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    truth = {row["sample_id"]: row["output"] == row["expected"] for row in rows if row["experiment"] == "medium"}
    drawn = random.Random(3).sample(sorted(truth), 40)
    lines = [f"{name},{'pass' if truth[name] else 'fail'}" for name in drawn]
    person.write("labels.csv", "\n".join(["id,label", *lines]) + "\n")
    screen = person.type("fairtrial calibrate bench:medium --labels labels.csv --labels-drawn")
    found = re.search(r"People would pass ([\d.]+)% \(([\d.]+)% to ([\d.]+)%\)", " ".join(screen.split()))
    assert found is not None, screen
    share = 100 * sum(truth.values()) / len(truth)
    assert float(found[2]) <= share <= float(found[3]), (share, screen)
    assert "sensitivity" in screen


@task(
    "B5",
    wants="a ranking of the three systems that respects the passages which questions share",
    outcome="rank intervals over 12 clusters; no probability of being the best that contradicts them without a word",
)
def leaderboard(person: Person) -> None:
    benchmark(person)
    for options in ("", " --cluster passage"):
        screen = " ".join(person.type(f"fairtrial leaderboard bench{options}").split())
        assert re.search(r"2 of 3 systems may be the best: large \([\d.]+%\), medium \(", screen), screen
        # By itself this would look as if it were decided.
        assert re.search(r"P\(best\) of large is 9\d\.\d%, although its rank may be 1 to 2: .* quote those", screen), (
            screen
        )
        assert ("12 clusters" in screen) == bool(options), screen


@task(
    "B6",
    wants="to quote that the large system is better than the medium one",
    outcome="a difference with its interval, and a word that two of three systems were chosen without an adjustment",
)
def chosen_pair(person: Person) -> None:
    benchmark(person)
    screen = " ".join(person.type("fairtrial compare bench:medium bench:large").split())
    assert re.search(r"\+[\d.]+ points \(95% interval", screen), screen
    assert "leaderboard" in screen, screen


@task(
    "B7",
    wants="the benchmark in a notebook: run, await, look, and a data frame",
    outcome="all cells run; report, comparison and ranking are shown as HTML; the frame has 180 rows",
)
def notebook(person: Person) -> None:
    benchmark(person, run=False)
    cells = [
        "from bench import suite\nfrom fairtrial import compare, leaderboard",
        "report = suite.run_sync(store='memory:')\nreport",
        "again = await suite.run(store='memory:')\ncompare(again['small'], again['large'])",
        "leaderboard(report)",
        "frame = report.to_pandas()\nprint(len(frame), sorted(frame.experiment.unique()))",
    ]
    for cell in cells:
        person.write("cell.py", cell.replace("await ", ""))
    document = {
        "nbformat": 4,
        "nbformat_minor": 5,
        "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
        "cells": [
            {"cell_type": "code", "id": f"c{n}", "metadata": {}, "execution_count": None, "outputs": [], "source": cell}
            for n, cell in enumerate(cells)
        ],
    }
    path = person.write("bench.ipynb", json.dumps(document))
    person.type("jupyter execute --inplace bench.ipynb")
    outputs = [cell["outputs"] for cell in json.loads(path.read_text())["cells"]]
    for shown in outputs[1:4]:
        assert any("text/html" in output.get("data", {}) for output in shown), shown
    assert "180 ['large', 'medium', 'small']" in "".join(outputs[4][0]["text"])


@task(
    "B8",
    wants="the figures of every passage, for each system",
    outcome="twelve groups of five for each system, and the same slices with intervals on the command line",
    pages=("docs/how-to/evaluators.md",),
)
def groups(person: Person) -> None:
    benchmark(person)
    person.write(
        "groups.py",
        """
from bench import suite

report = suite.run_sync(store="memory:")
for name in ("small", "medium", "large"):
    print(name, len(report[name].group_by("passage")))
""",
    )
    assert person.type("python groups.py").split() == ["small", "12", "medium", "12", "large", "12"]
    assert "p11" in person.type("fairtrial show bench:large --by passage")


COUNTS = """
from fairtrial import Dataset, EvalSuite, Metric, Sample, Score


def turns(output: int, expected: int) -> Score:
    return Score(metrics=[Metric("turns", output)])


numbers = [Sample(f"q{n}", n, n) for n in range(60)]
counted = {"zeros": lambda n: 0, "sevens": lambda n: 7, "one": lambda n: int(n == 7), "two": lambda n: 2 * int(n == 7)}
for name, task in counted.items():
    EvalSuite(name, Dataset(numbers, name="numbers"), task, turns).run_sync(store="runs.db")
"""


@task(
    "B9",
    wants="the mean of a count that happens to be 0 in every trial, or 1 in one",
    outcome="no interval of a proportion: counts are treated alike whatever their values are",
)
def counts(person: Person) -> None:
    person.write("counts.py", COUNTS)
    person.type("python counts.py")
    found = {}
    for name in ("zeros", "sevens", "one", "two"):
        report = json.loads(person.type(f"fairtrial show {name} --store runs.db --json"))
        (found[name],) = (
            one for one in report["experiments"][0]["estimates"] if one["metric"] == "turns" and one["view"] == "scored"
        )
    for name in ("zeros", "sevens"):
        assert found[name]["low"] is None, found[name]
        assert found[name]["note"] == found["zeros"]["note"], found
    # A count of 1 has the interval of a count of 2, half as wide.
    assert found["one"]["method"] == found["two"]["method"], found
    for end in ("low", "high"):
        assert math.isclose(2 * found["one"][end], found["two"][end]), found


@task(
    "B10",
    wants="a table and a methods sentence for a paper",
    outcome="a LaTeX table with the differences and their intervals, and a paragraph with design, n and tests",
)
def paper(person: Person) -> None:
    benchmark(person)
    table = person.type("fairtrial compare bench:small bench:medium bench:large --cluster passage --format latex")
    assert table.count("\\begin{") == table.count("\\end{") > 0, table
    assert "tabular" in table
    assert "\\%" in table or "points" in table, table
    methods = person.type("fairtrial compare bench:small bench:medium bench:large --cluster passage --methods")
    assert all(word in methods for word in ("60", "12", "95")), methods


@task(
    "B11",
    wants="a bundle with which somebody else can check the figures of the paper",
    outcome="one file that another machine verifies and shows the same pass rates from; a changed file is refused",
)
def bundle(person: Person) -> None:
    benchmark(person)
    person.type("fairtrial export bench --format bundle --output bench.zip")
    rate = json.loads(person.type("fairtrial show bench --json"))["experiments"][2]["estimates"][0]
    other = Person(person.world, person.folder / "another-machine", person.read, person.commands)
    other.folder.mkdir()
    assert "match" in other.type("fairtrial import ../bench.zip --verify")
    other.type("fairtrial import ../bench.zip")
    assert json.loads(other.type("fairtrial show bench --json"))["experiments"][2]["estimates"][0] == rate
    with (
        zipfile.ZipFile(person.folder / "bench.zip") as made,
        zipfile.ZipFile(other.folder / "changed.zip", "w") as made_up,
    ):
        for name in made.namelist():
            text = made.read(name)
            made_up.writestr(name, text.replace(b"0.", b"1.", 1) if name == "figures.json" else text)
    assert "changed" in other.type("fairtrial import changed.zip --verify", 2)
