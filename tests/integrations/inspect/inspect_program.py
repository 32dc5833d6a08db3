"""Runs tasks of Inspect with Inspect's own runner and with ours and requires the same scores.

python inspect_program.py DIR   needs inspect-ai, inspect-evals and redis-server; run by `scripts/peers files inspect`
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ["INSPECT_DISPLAY"] = "none"
sys.path.insert(0, str(Path(__file__).parent))

import anyio
import inspect_suite
from inspect_ai import Epochs, Task, eval
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import match, value_to_float

from fairtrial import ConfigurationError, open_store
from fairtrial.integrations.inspect import suite
from fairtrial.integrations.sandbox import Sandbox

SUITE = Path(__file__).with_name("inspect_suite.py")
FAIRTRIAL = Path(sys.executable).with_name("fairtrial")
NUMBER = value_to_float()


def require(condition: bool, text: str) -> None:
    if not condition:
        raise SystemExit(f"failed: {text}")


def by_inspect(task: Task, model: Any, folder: Path) -> dict[tuple[str, str], float]:
    """(sample, scorer) -> score, by Inspect's own runner."""
    (log,) = eval(task, model=model, log_dir=str(folder / "logs"), epochs=1)
    require(log.status == "success", f"Inspect: {log.status} {log.error}")
    return {
        (str(sample.id), name): float(NUMBER(score.value))
        for sample in log.samples or ()
        for name, score in (sample.scores or {}).items()
    }


def by_us(store: Any, run_id: str) -> dict[tuple[str, str], float]:
    results = list(store.results(run_id))
    bad = [one for one in results if one.outcome != "scored"]
    require(not bad, f"{len(bad)} trials were not scored: {bad[0].error if bad else ''}")
    return {(one.sample_id, metric.name): metric.value for one in results for metric in one.score.metrics}


def stored(url: str) -> tuple[Any, dict[tuple[str, str], float]]:
    store = open_store(url)
    (run,) = store.runs()
    return run, by_us(store, run.run_id)


def killed(folder: Path) -> tuple[dict[tuple[str, str], float], dict[str, Any]]:
    """Kill a run in the middle and start it again."""
    url, calls = f"sqlite:///{folder}/killed.db", folder / "killed-calls"
    command = (FAIRTRIAL, "run", SUITE, "--store", url, "--quiet")
    env = {**os.environ, "CALLS": str(calls)}
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and (not calls.exists() or calls.read_text().count("\n") < 150):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = calls.read_text().count("\n")
    store = open_store(url)
    (run,) = store.runs()
    partial = sum(1 for _ in store.results(run.run_id))
    require(0 < partial < inspect_suite.SAMPLES, f"{partial} trials were stored when the run was killed")
    subprocess.run(command, env=env, stdout=subprocess.DEVNULL)
    run, scores = stored(url)
    repeated = calls.read_text().count("\n") - 2 * inspect_suite.SAMPLES
    require(run.status == "finished", f"the run is {run.status}")
    require(repeated <= before - 2 * partial + 2, f"{repeated} calls were repeated for trials that were stored")
    return scores, {"stored when killed": partial, "model calls repeated": repeated}


def fleet(folder: Path) -> tuple[dict[tuple[str, str], float], dict[str, Any]]:
    """Run over two workers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, mailbox, calls = f"sqlite:///{folder}/fleet.db", f"redis://127.0.0.1:{port}", folder / "fleet-calls"
    env = {**os.environ, "CALLS": str(calls)}
    redis = subprocess.Popen(
        ("redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)),
        stdout=subprocess.DEVNULL,
    )
    workers: list[subprocess.Popen[bytes]] = []
    try:
        time.sleep(0.5)
        quiet = {"env": env, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        for _ in range(2):
            command = (FAIRTRIAL, "worker", SUITE, "--mailbox", mailbox, "--concurrency", "4")
            workers.append(subprocess.Popen(command, **quiet))  # type: ignore[call-overload]
        done = subprocess.run(
            (FAIRTRIAL, "run", SUITE, "--store", url, "--mailbox", mailbox, "--quiet"), env=env, timeout=300,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        require(done.returncode in (0, 1), f"fairtrial run ended with {done.returncode}")
    finally:
        for process in (*workers, redis):
            process.terminate()
        for process in (*workers, redis):
            process.wait(60)
    _, scores = stored(url)
    used = {int(line) for line in calls.read_text().split()}
    require(len(used) == 2, f"{len(used)} processes called the model")
    return scores, {"workers": len(used)}


def refusals() -> list[str]:
    """Tasks with what needs Inspect's own runner are refused by name."""
    data = MemoryDataset([Sample(input="a", target="a")])
    cases: dict[str, dict[str, Any]] = {
        "message_limit": {"message_limit": 3},
        "time_limit": {"time_limit": 3},
        "approval": {"approval": "auto"},
        "sandbox docker": {"sandbox": "docker"},
        "epochs reduced by max": {"epochs": Epochs(2, "max")},
    }
    for name, settings in cases.items():
        try:
            suite(Task(dataset=data, scorer=match(), **settings), model="mockllm/model")
        except ConfigurationError as error:
            require(name in str(error), f"{name} is not named: {error}")
        else:
            raise SystemExit(f"failed: {name} was accepted")
    return list(cases)


def answering(text: Callable[[str], str]) -> Any:
    def reply(input: Any, tools: Any, tool_choice: Any, config: Any) -> Any:
        output = ModelOutput.from_content("mockllm/model", text(input[-1].text))
        output.usage = ModelUsage(input_tokens=1, output_tokens=1, total_tokens=2)
        return output

    return get_model("mockllm/model", custom_outputs=reply, memoize=False)


def local_rows(module: Any, rows: list[dict[str, Any]]) -> None:
    """Have the tasks of a module read these rows instead of a dataset from a hub."""

    def hf_dataset(
        *args: Any, sample_fields: Callable[[dict[str, Any]], Any], limit: int | None = None, **kw: Any
    ) -> Any:
        made = [sample_fields(row) for row in rows[:limit]]
        return MemoryDataset(
            [one for found in made for one in (found if isinstance(found, list) else [found])], name="local"
        )

    module.hf_dataset = hf_dataset


def benchmarks() -> dict[str, tuple[Callable[[], Task], Any]]:
    """Five tasks of inspect_evals on rows made here, code execution included."""
    # The packages export functions under the names of these modules.
    arc, boolq, commonsense_qa, gsm8k, humaneval = (
        import_module(f"inspect_evals.{name}.{name}")
        for name in ("arc", "boolq", "commonsense_qa", "gsm8k", "humaneval")
    )
    names = ["add", "sub", "mul", "same"]
    bodies = {"add": "a + b", "sub": "a - b", "mul": "a * b", "same": "a == b"}
    local_rows(humaneval, [
        {"task_id": f"local/{name}", "entry_point": name, "canonical_solution": f"    return {body}\n",
         "prompt": f"def {name}(a, b):\n    \"\"\"Return {body}.\"\"\"\n",
         "test": f"def check(candidate):\n    a, b = 7, 3\n    assert candidate(a, b) == ({body})\n"}
        for name, body in bodies.items()
    ])  # fmt: skip
    local_rows(gsm8k, [
        {"question": f"Ann has {n} pens and buys {n + 2}. How many has she?", "answer": f"Add.\n#### {2 * n + 2}"}
        for n in range(2, 14)
    ])  # fmt: skip
    letters = ["A", "B", "C", "D", "E"]
    questions = [
        {"id": f"q{n}", "question": f"Which is {n}?", "question_concept": "number", "answerKey": letters[n % 5],
         "choices": {"label": letters, "text": [str(n + k - n % 5) for k in range(5)]}}
        for n in range(10, 22)
    ]  # fmt: skip
    local_rows(arc, questions)
    local_rows(commonsense_qa, questions)
    local_rows(boolq, [
        {"question": f"is {n} even", "passage": f"The number is {n}.", "answer": n % 2 == 0} for n in range(12)
    ])  # fmt: skip

    def code(prompt: str) -> str:
        name = next(name for name in names if f"def {name}(" in prompt)
        wrong = "a" if name == "mul" else bodies[name]
        return f"```python\ndef {name}(a, b):\n    return {wrong}\n```"

    def number(prompt: str) -> str:
        n = int(prompt.rpartition("Ann has ")[2].split()[0])
        return f"So\nANSWER: {2 * n + 2 if n % 3 else n}"

    def letter(prompt: str) -> str:
        n = int(prompt.rpartition("Which is ")[2].split("?")[0])
        return f"ANSWER: {letters[n % 5] if n % 4 else 'A'}"

    def truth(prompt: str) -> str:
        n = int(prompt.rpartition("question: is " if "question: is " in prompt else " is ")[2].split()[0])
        return "Yes" if n % 2 == 0 or n == 5 else "No"

    return {
        "humaneval": (lambda: humaneval.humaneval(sandbox="local"), answering(code)),
        "gsm8k": (lambda: gsm8k.gsm8k(fewshot=3), answering(number)),
        "arc_easy": (arc.arc_easy, answering(letter)),
        "commonsense_qa": (lambda: commonsense_qa.commonsense_qa(shuffle=False), answering(letter)),
        "boolq": (lambda: boolq.boolq(shuffle=False), answering(truth)),
    }


def hugging_face(folder: Path) -> int:
    """Datasets of Hugging Face without a network, as docs/how-to/datasets.md says."""
    import datasets

    from fairtrial import Dataset
    from fairtrial import Sample as OurSample

    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps({"question": f"{n}+1?", "answer": str(n + 1)}) + "\n" for n in range(5)))
    loaded = datasets.load_dataset("json", data_files=str(file), split="train", cache_dir=str(folder / "cache"))
    loaded.save_to_disk(str(folder / "saved"))
    made = [
        Dataset([OurSample(f"r{n}", row["question"], row["answer"]) for n, row in enumerate(rows)])
        for rows in (loaded, datasets.load_from_disk(str(folder / "saved")))
    ]
    require(made[0].fingerprint == made[1].fingerprint, "the two datasets differ")
    require([one.expected for one in made[0]] == ["1", "2", "3", "4", "5"], "the rows differ")
    return len(made[0])


async def provider() -> str:
    """Commands in a sandbox of Inspect's own kind "local", as in sandboxes of ours."""
    async with Sandbox("inspect:local", env={"GREETING": "hello"}) as box:
        await box.write_file("deep/file", "é\n")
        require(await box.read_file("deep/file") == "é\n", "a file is read back")
        result = await box.exec(["sh", "-c", "cat; echo $GREETING $1; exit 3", "sh", "x"], input="in\n", cwd="deep")
        require((result.returncode, result.stdout) == (3, "in\nhello x\n"), f"a command returns {result}")
        require((await box.exec(["no-such-program"])).returncode == 127, "a missing program is a result")
        require((await box.exec(["sleep", "60"], timeout=1)).limit == "time", "the time limit ends a command")
        require(await box.python("print(6 * 7)") == "42", "a tool prints")
        return box.enforcement


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    theirs = by_inspect(inspect_suite.sums(), inspect_suite.model(), folder)
    require(len(theirs) == 2 * inspect_suite.SAMPLES, f"Inspect gave {len(theirs)} scores")
    report = inspect_suite.suite.run_sync(store=f"sqlite:///{folder}/whole.db")
    require(by_us(report.store, report.run_id) == theirs, "the scores of a run differ from Inspect's")
    facts: dict[str, Any] = {"samples": inspect_suite.SAMPLES, "mean": report["mock"].pass_rate}
    for way in (killed, fleet):
        scores, found = way(folder)
        require(scores == theirs, f"the scores of a {way.__name__} run differ from Inspect's")
        facts[way.__name__] = found
    facts["refused"] = refusals()
    for name, (make, model) in benchmarks().items():
        theirs = by_inspect(make(), model, folder)
        report = suite(make, model={"mock": model}, name=name).run_sync(store="memory:")
        ours = by_us(report.store, report.run_id)
        require(ours == theirs, f"{name}: {ours} is not {theirs}")
        require(0 < sum(theirs.values()) < len(theirs), f"{name}: the scores do not tell right from wrong")
        facts[name] = {"samples": len(ours), "accuracy": sum(ours.values()) / len(ours)}
    facts["rows of Hugging Face"] = hugging_face(folder)
    facts["sandbox of Inspect"] = anyio.run(provider)
    print(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
