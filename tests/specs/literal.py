"""Execute every block of the specifications as it stands, and record what came of it.

    python -m tests.specs.literal FOLDER    the folder of the specifications; writes literal.json and prints the page
    python -m tests.specs.literal           print the page of the documentation site, from literal.json and blocks.toml

Nothing of their text is kept: a block is known by its number and a digest. The modules that blocks import from are made
empty and lend the names of `fairtrial.specifications`. A block that defines a record or a function is compared with
ours: every field by position and by keyword, its defaults, and the parameters of functions and methods. A block that
uses them is executed, with the names that it takes for granted.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import dataclasses
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import redis

from fairtrial.base.sync_bridge import call_sync
from fairtrial.integrations.model_server import ModelServer, Reply
from fairtrial.models import ScriptedAdapter
from tests.redis_server import RedisServer
from tests.specs.definitions import compare_definitions, ours
from tests.specs.page import RESULTS, read, render

LENT = [
    "weakincentives",
    "weakincentives.adapters",
    "weakincentives.adapters.openai",
    "weakincentives.runtime",
    "weakincentives.runtime.events",
    "weakincentives.evals",
    "weakincentives.contrib",
    "weakincentives.contrib.langsmith",
    "evals",
    "evals.loaders",
    "evals.analysis",
    "rollouts",
    "rollouts.training",
    "rollouts.training.datasets",
    "rollouts.training.backends",
]
# Names of Python that the blocks use without importing them.
PRELUDE = (
    "import json, time, inspect\nfrom collections.abc import *\nfrom dataclasses import *\nfrom datetime import *\n"
    "from pathlib import Path\nfrom typing import *\nfrom uuid import *\n"
    "InputT, OutputT, ExpectedT, T, O, E = map(TypeVar, ('InputT', 'OutputT', 'ExpectedT', 'T', 'O', 'E'))\n"
)
DRAWINGS = {1, 48, 68}  # No code, no names: the test that the page lists shows the same.


class Lender(types.ModuleType):
    """An empty module that lends our names."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(ours, name)


def lend() -> None:
    """Make the modules that blocks import from."""
    for name in LENT:
        sys.modules[name] = Lender(name)


def read_blocks(folder: Path) -> dict[int, str]:
    """Return the fenced blocks of the specifications, numbered in order."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.txt"))]
    found = [block for text in texts for block in re.findall(r"^```[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)]
    return dict(enumerate(found, 1))


type Names = dict[str, Any]


def names(**given: Any) -> Names:
    """Return the names that a block finds: Python's, ours, and those given."""
    module = sys.modules["specification"] = types.ModuleType("specification")
    found = module.__dict__
    exec(PRELUDE, found)
    found.update({name: getattr(ours, name) for name in ours.__all__}, **given)
    return found


class World:
    """What the blocks take for granted: files, a model, a Redis server, and names of other blocks."""

    def __init__(self, blocks: dict[int, str], folder: Path, port: int) -> None:
        self.blocks = blocks
        self.folder = folder
        self.port = port
        self.structured = False
        self.whole: Names = {}
        self.rows = [
            {"id": "1", "input": "What is 2+2?", "expected": "4"},
            {"id": "2", "input": "Capital of France?", "expected": "Paris"},
        ]

    def run(self, number: int, found: Names, text: str | None = None) -> Names:
        """Execute a block, or a part of it, with these names."""
        exec(compile(self.blocks[number] if text is None else text, f"block {number}", "exec"), found)
        return found

    def reply(self, request: Any) -> Reply:
        """The answers of the model under test, and of judges."""
        if "judge" in request.system:
            return Reply(output={"reason": "fine", "rating": "good"})
        answer = "Paris" if "France" in request.last_user else "5"
        return Reply(output={"answer": answer}) if self.structured else Reply(answer)

    def write(self, name: str, rows: list[Any]) -> Path:
        """Write a JSONL file to the folder that the blocks run in."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    def definitions_of(self, number: int) -> str:
        """The imports and classes of a block, for blocks that refer to it."""
        body = [
            n for n in ast.parse(self.blocks[number]).body if isinstance(n, ast.ClassDef | ast.Import | ast.ImportFrom)
        ]
        return "\n".join(map(ast.unparse, body))


def check(right: bool, what: str) -> None:
    """Fail if what a block did is not what it says."""
    if not right:
        raise AssertionError(what)


def data(world: World, number: int) -> None:
    path = world.folder / f"block{number}.jsonl"
    path.write_text(world.blocks[number])
    loaded = ours.Dataset.load(path, str, str)
    check(
        [sample.id for sample in loaded] == [str(i + 1) for i in range(len(loaded))],
        "the samples are those of the file",
    )


def block_21(world: World) -> None:
    world.run(21, names(main_loop=world.whole["main_loop"], requests=world.whole["requests"]))


def block_25(world: World) -> None:
    found = world.run(25, names())
    check(found["evaluator"]("It is Paris.", "Paris").passed, "three criteria are met")


def block_30(world: World) -> None:
    requests = ours.InMemoryMailbox(name="q")
    ours.submit_dataset(ours.Dataset((ours.Sample("1", "a", "b"),)), requests)
    check(call_sync(requests.approximate_count) == 1, "one request is in the mailbox")


def block_32(world: World) -> None:
    world.whole = world.run(32, names())
    report = world.whole["report"]
    check((report.total, report.pass_rate) == (2, 0.5), f"one of two passes (got {report.pass_rate})")


def block_33(world: World) -> None:
    report = world.run(33, world.whole)["report"]
    check(set(report.scores_by_criterion) >= {"contains"} and report.total == 2, "criteria are named")


def block_34(world: World) -> None:
    check(world.run(34, world.whole)["report"].total == 3, "three samples made in code")


def block_35(world: World) -> None:
    world.whole.update(math_loop=world.whole["main_loop"], math_dataset=world.whole["dataset"])
    report = world.run(35, world.whole)["report"]
    check(report.pass_rate == 0.0 and len(report.failed_samples()) == 3, "no calculator was called")


def block_36(world: World) -> None:
    found, session = world.run(36, names()), ours.Session()
    check(not found["evaluator"]("a", "a", session).passed, "no step is completed")
    session.record(found["PlanStep"]("x", "completed"))
    check(found["evaluator"]("a", "a", session).passed, "one step is completed")


def processes(workers: int) -> Callable[[World], None]:
    def run(world: World) -> None:
        prologue = (
            f"import sys; sys.path[:0] = {sys.path!r}\n"
            "import redis\nfrom tests.specs import literal; literal.lend()\n"
            f"class Local(redis.Redis):\n    def __init__(self, host, port): super().__init__(port={world.port})\n"
            "redis.Redis = Local\nglobals().update(literal.names())\n__name__ = '__main__'\n"
        )
        (world.folder / "worker.py").write_text(f"{prologue}{world.definitions_of(32)}\n{world.blocks[37]}")
        (world.folder / "client.py").write_text(f"{prologue}{world.blocks[38]}")
        running = [subprocess.Popen([sys.executable, "worker.py"], stderr=subprocess.DEVNULL) for _ in range(workers)]
        try:
            client = subprocess.run([sys.executable, "client.py"], capture_output=True, text=True, timeout=120)
        finally:
            for process in running:
                process.terminate()
            for process in running:
                process.wait(30)
        check("50.0%" in client.stdout and " 2 " in client.stdout, f"two are collected: {client.stderr[-300:]}")

    return run


def tests_of(number: int) -> Callable[[World], None]:
    def run(world: World) -> None:
        found = world.run(number, names(mock_adapter=Mock(), session=ours.Session()))
        tests = [value for name, value in found.items() if name.startswith("test_")]
        check(len(tests) > 1, "the block has tests")
        for test in tests:
            test()

    return run


def block_43(world: World) -> None:
    """The six steps, with a mailbox for the results: as drawn, without one, requests are dead-lettered."""
    for kind in ("memory", "redis"):
        client = redis.Redis(port=world.port)
        boxes = [
            ours.InMemoryMailbox(name=n) if kind == "memory" else ours.RedisMailbox(name=f"six-{n}", client=client)
            for n in ("eval", "main", "results")
        ]
        evals, main, results = boxes
        loop = ours.EvalLoop(evaluator=ours.exact_match, requests=evals, mainloop_requests=main)
        worker = ours.MainLoop(lambda text: "Paris" if "France" in text else "5", requests=main)
        thread = threading.Thread(target=worker.run, daemon=True)
        thread.start()
        dataset = ours.Dataset.load(world.folder / "qa.jsonl", str, str)
        ours.submit_dataset(dataset, ours.Experiment("baseline"), evals, reply_to=results)
        loop.run(max_iterations=1)
        report = ours.collect_results(results, len(dataset), timeout_seconds=60)
        worker.stop()
        thread.join(30)
        check((report.total, report.pass_rate) == (2, 0.5), f"two results over two hops ({kind})")


def block_44(world: World) -> None:
    boxes = {f"{name}_requests_mailbox": ours.InMemoryMailbox(name=name) for name in ("eval", "mainloop")}
    check(isinstance(world.run(44, names(**boxes))["eval_loop"], ours.EvalLoop), "a loop is made")


def block_45(world: World) -> None:
    class MyMainLoop(ours.MainLoop):  # type: ignore[misc]
        def initialize(self, question: str) -> Any:
            raise NotImplementedError

    found = names(redis=redis.Redis(port=world.port), adapter=ScriptedAdapter(["x"]), MyMainLoop=MyMainLoop)
    check(isinstance(world.run(45, found)["mainloop"], MyMainLoop), "a loop is made")


def block_47(world: World) -> None:
    session = ours.Session()
    session.record(ours.ToolInvoked("x"))
    found = names(
        session_store=ours.SessionStore(ours.InMemorySessionStore()), session_id="a", session=session, output="o",
        expected="o", result=ours.MainLoopResult(request_id="1", output="o", session_id="a"),
        evaluator=ours.all_of(ours.exact_match, ours.tool_called("x")),
    )  # fmt: skip
    check(world.run(47, found)["score"].passed, "the session is that which was saved")


def block_51(world: World) -> None:
    found = names(problems=[("1+1", "2")])
    for name, field in (
        ("QAInput", "question"),
        ("QAExpected", "answer"),
        ("MathInput", "problem"),
        ("MathExpected", "answer"),
    ):
        found[name] = dataclasses.make_dataclass(name, [(field, str)], frozen=True, slots=True, module="specification")
    made = world.run(51, found)["dataset"]
    check((made.name, made.version, len(made)) == ("math-eval", "1.0", 1), "a named dataset")


def in_context(number: int) -> Callable[[World], None]:
    def run(world: World) -> None:
        found = world.run(number, names())
        sample, context = ours.Sample("1", "x", "yes"), ours.EvalContext(ScriptedAdapter(["x"]), ours.Session(), "r")
        (name,) = (node.name for node in ast.parse(world.blocks[number]).body if isinstance(node, ast.FunctionDef))
        mine, theirs = getattr(ours, name), found[name]
        for output in ("yes", "oh yes", "no"):
            by_position = mine(sample, output, context=context)
            check(by_position == mine(sample=sample, output=output, context=context), "by position and by keyword")
            expected = theirs(sample, output, context=context)
            check([(s.criterion, s.value) for s in by_position] == [(s.criterion, s.value) for s in expected], "scores")

    return run


def block_63(world: World) -> None:
    from tests.integrations.tracing.collector import Collector

    with Collector() as server:
        os.environ["LANGSMITH_ENDPOINT"], os.environ["LANGSMITH_API_KEY"] = server.url, "lsv2_of_blocks_0123456789"
        world.run(63, names())
        sample = ours.Sample("1", "a", "A")
        ours.EvalSuite(dataset=ours.Dataset((sample,)), task=str.upper, evaluator=ours.exact_match).run(store="memory:")
        ours.configure_wink(project="x", tracing_enabled=False)
        check(len(server.spans) == 1, "the run was traced")


def block_64(world: World) -> None:
    bus = ours.ControlDispatcher()
    found = world.run(64, names(session=ours.Session(dispatcher=bus)))
    check(found["current_results"] == (), "nothing yet")
    dataset = ours.Dataset((ours.Sample("1", "a", "A"),))
    ours.EvalSuite(dataset=dataset, task=str.upper, evaluator=ours.exact_match).run(store="memory:", bus=bus)
    check(len(found["session"].query(ours.EvalResult).all()) == 1, "a result has accumulated")


def block_65(world: World) -> None:
    world.structured = True
    report = world.run(65, names())["report"]
    world.structured = False
    check(report.total_samples == 2 and len(report.scores_by_criterion) == 3, "two samples, three criteria")


def block_66(world: World) -> None:
    lines = world.blocks[66].replace("\\\n", " ").splitlines()
    refused = []
    for line in (line for line in lines if line.strip() and not line.startswith("#")):
        arguments = line.partition(">")[0].split()[2:]
        done = subprocess.run([sys.executable, "-m", "fairtrial.cli", *arguments], capture_output=True, text=True)
        if done.returncode:
            refused.append(arguments[0])
    check(not refused, f"refused: {', '.join(refused)}")


def block_69(world: World) -> None:
    sample = ours.Sample[str, int]("1", "a", 2)
    check(ours.Dataset[str, int]((sample,))[0] == sample, "generic records by position")


def block_70(world: World) -> None:
    check(ours.Score(0.5, False, "r") == ours.Score(value=0.5, passed=False, reason="r"), "by position and by keyword")


def block_72(world: World) -> None:
    adapter = ours.OpenAIAdapter(model="gpt-4o")
    world.run(72, names(adapter=adapter, criterion="short"))
    check(ours.llm_judge(adapter, "short")("Paris", "Paris").value == 0.75, "a judge of two texts")


def block_73(world: World) -> None:
    result = ours.EvalResult("1", ours.Score(1.0, True), 12, None)
    check(
        (result.sample_id, result.score, result.latency_ms, result.error) == ("1", ours.Score(1.0, True), 12, None),
        "as given",
    )
    check(ours.EvalReport((result,)).total == 1, "a report of results")


def block_74(world: World) -> None:
    boxes = {name: ours.InMemoryMailbox(name=name) for name in ("requests", "results")}
    ours.EvalLoop(loop=ours.MainLoop(str.upper), evaluator=ours.exact_match, **boxes)


def block_75(world: World) -> None:
    rows = [{"problem": f"{i}+0", "answer": str(i), "level": i % 3} for i in range(6)]
    world.write("data/math_500.jsonl", rows)
    for name in ("configs", "configs.evals", "configs.evals.math_base"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["configs.evals.math_base"].config = ours.EvalConfig()  # type: ignore[attr-defined]
    found = names(extract_boxed_answer=str, normalized_equal=str.__eq__)
    sys.argv = ["block75"]
    world.run(75, found | {"__name__": "__main__"})


def block_76(world: World) -> None:
    sample = ours.Sample("1", {"p": 1}, ground_truth="x", metadata={"difficulty": 2})
    task = ours.agent_task(
        ScriptedAdapter(["x"], repeat=True), prepare_messages=lambda s: [{"role": "user", "content": "?"}]
    )
    scored = ours.Score(metrics=(ours.Metric("correct", 0.0, weight=1.0),))
    config = dataclasses.replace(ours.EvalConfig(), experiment_name="math_500_a")

    def score_fn(trajectory: Any, sample: Any) -> Any:
        return scored

    score_fn.__annotations__ = {"trajectory": ours.Trajectory, "sample": ours.Sample}
    report = asyncio.run(ours.evaluate([sample], task, score_fn, config))
    report.save(world.folder / "outputs/evals/math_500_a")
    check(len(world.run(76, names())["failures"]) == 1, "one failure is listed")


def block_77(world: World) -> None:
    asked = ScriptedAdapter(["ok", "no"], repeat=True)

    class Backend:
        def train_step(self, trajectories: Any, advantages: Any) -> float:
            return float(len(advantages))

    def score_fn(trajectory: Any, sample: Any) -> Any:
        return ours.Score(metrics=(ours.Metric("length", float(len(trajectory.messages)), weight=1.0),))

    train = world.run(77, names())["run_rl_training"]
    config = ours.RLTrainingConfig(num_steps=2, batch_size=2, endpoint=asked)
    history = asyncio.run(train(Backend(), ours.DataBuffer(["p", "q"]), score_fn, config))
    check([entry["loss"] for entry in history] == [2.0, 2.0], "two steps of two rollouts")
    said = {call.messages[-1].text for call in asked.calls}
    check(said == {"p", "q"}, f"the prompts are sent as they are (got {sorted(said)[0]!r:.60})")


def block_80(world: World) -> None:
    protocol, found = world.run(80, names()), world.run(81, names())
    environment = found["CalculatorEnvironment"]()
    environment._history = [1]
    check(
        isinstance(environment, protocol["Environment"]) and isinstance(environment, ours.Environment), "an environment"
    )
    registry = ours.EnvironmentRegistry(found["CalculatorEnvironment"])

    async def restored() -> Any:
        return (await registry.restore(await environment.serialize())).environment

    check(asyncio.run(restored())._history == [1], "restored")


USES: dict[int, Callable[[World], None]] = {
    4: lambda world: data(world, 4), 42: lambda world: data(world, 42),
    21: block_21, 25: block_25, 30: block_30, 32: block_32,
    33: block_33, 34: block_34, 35: block_35, 36: block_36, 37: processes(1), 38: processes(1), 39: processes(3),
    40: tests_of(40), 41: tests_of(41), 43: block_43, 44: block_44, 45: block_45, 47: block_47, 51: block_51,
    56: in_context(56), 57: in_context(57), 63: block_63,
    64: block_64, 65: block_65, 66: block_66, 67: tests_of(67), 69: block_69, 70: block_70, 72: block_72, 73: block_73,
    74: block_74, 75: block_75, 76: block_76, 77: block_77, 80: block_80, 81: block_80,
}  # fmt: skip
ORDER = [32, *(number for number in range(1, 82) if number != 32)]  # Others go on where it ends.


def try_block(world: World, number: int) -> list[str]:
    """Execute a block; returns what differs from it."""
    if number in DRAWINGS:
        return []
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            if number in USES:
                USES[number](world)
                return []
            found = world.run(number, names())
            return list(dict.fromkeys(compare_definitions(world.blocks[number], found)))
    except (Exception, SystemExit) as error:
        if os.environ.get("TRACEBACK"):
            traceback.print_exc()
        return [f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"]


def main(folder: Path) -> None:
    """Execute every block and write what came of it."""
    lend()
    blocks = read_blocks(folder)
    home = Path.cwd()
    with tempfile.TemporaryDirectory() as work, RedisServer(Path(work) / "redis") as server:
        world = World(blocks, Path(work), server.port)
        world.write("qa.jsonl", world.rows)
        world.write("tests/fixtures/qa.jsonl", world.rows)
        asked = [{**row, "input": {"question": row["input"]}} for row in world.rows]
        world.write("tests/fixtures/qa_eval.jsonl", asked)
        world.write(
            "tests/fixtures/qa_samples.jsonl", [{**row, "expected": {"answer": row["expected"]}} for row in asked]
        )
        with ModelServer(world.reply) as model:
            os.environ.update(OPENAI_BASE_URL=f"{model.base_url}/v1", OPENAI_API_KEY="test")
            os.chdir(work)
            try:
                found = {number: try_block(world, number) for number in ORDER}
            finally:
                os.chdir(home)
    results: list[dict[str, Any]] = [
        {
            "block": number,
            "digest": hashlib.sha256(text.encode()).hexdigest()[:16],
            "kind": "drawing" if number in DRAWINGS else "use" if number in USES else "definition",
            "differences": found[number],
        }
        for number, text in blocks.items()
    ]
    RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    for entry in results:
        if entry["differences"]:
            print(entry["block"], "; ".join(entry["differences"]))


if __name__ == "__main__":
    if len(sys.argv) > 2:
        sys.exit(__doc__)
    if len(sys.argv) == 2:
        main(Path(sys.argv[1]).resolve())
    print(render(*read()), end="")
