"""Commands in forked copies of this process, which has the package imported: start-up is most of a command's time."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import runpy
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import NoReturn

from tests.first_hour.mistakes.case import GOOD, RAN, Mistake

SECONDS = 60
"""How long a step may take."""


@dataclass(frozen=True, slots=True)
class Judged:
    """What a case came to."""

    name: str
    verdict: str
    code: int
    faults: list[str]
    text: str
    why: str


def judge(cases: Sequence[Mistake], lanes: int = 2) -> list[Judged]:
    """Run cases in a few processes, each of which forks per command; returns them in their order."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    _load_what_a_run_loads()
    ends = []
    for lane in range(lanes):
        read, write = os.pipe()
        if os.fork() == 0:
            _as_child(partial(_write, write, cases[lane::lanes]))
        os.close(write)
        ends.append(read)
    found: dict[str, Judged] = {}
    for read in ends:
        with open(read, encoding="utf-8") as results:
            found |= {one["name"]: Judged(**one) for one in json.load(results)}
    for _ in ends:
        os.wait()
    return [found[case.name] for case in cases if case.name in found]


def _load_what_a_run_loads() -> None:
    """Import the modules that a run, a comparison and a broken command import, as a child process reports them."""
    with tempfile.TemporaryDirectory(prefix="mistake-") as name:
        folder = Path(name)
        (folder / "evals.py").write_text(GOOD["evals.py"], encoding="utf-8")
        if os.fork() == 0:
            _as_child(partial(_list_modules, folder))
        os.wait()
        names = (folder / "modules").read_text(encoding="utf-8").split()
    for module in names:
        with contextlib.suppress(Exception):
            importlib.import_module(module)


def _list_modules(folder: Path) -> None:
    from fairtrial.cli.app import invoke

    with (folder / "output").open("wb") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    for words in ("run evals.py", "run evals.py --resume never", "compare s@1 s@2", "trials s --failed", "nothing"):
        invoke(words.split())
    own = {name for name, module in sys.modules.items() if str(folder) in str(getattr(module, "__file__", ""))}
    (folder / "modules").write_text("\n".join(set(sys.modules) - own - {"__main__", "__mp_main__"}), encoding="utf-8")


def _write(write: int, cases: Sequence[Mistake]) -> None:
    judged = [
        asdict(_judge(case))
        for case in cases
        if all(map(importlib.util.find_spec, case.needs)) and all(map(shutil.which, case.programs))
    ]
    with open(write, "w", encoding="utf-8") as out:
        json.dump(judged, out)


def _judge(case: Mistake) -> Judged:
    with tempfile.TemporaryDirectory(prefix="mistake-") as name:
        folder = Path(name, "project")
        folder.mkdir()
        for path, text in case.files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(text.encode())
        code, texts = 0, []
        steps = [line for line in case.steps.strip().splitlines() if line.strip()]
        if steps[0] == RAN and case.files.get("evals.py") == GOOD["evals.py"]:
            shutil.copytree(_stored(), folder / ".fairtrial")
            del steps[0]
        for position, step in enumerate(steps):
            until = case.interrupt if position == len(steps) - 1 - case.steps_after else ""
            code, text = _step(case, step.strip(), folder, Path(name, "output"), until)
            texts.append(text.replace(str(folder.resolve()), "HERE"))
        faults = case.faults(code, texts[-1])
        for step, text in zip(steps, texts, strict=True):
            faults += [f"an internal error in {step}"] if "this is a bug in Fairtrial" in text else []
        shown = "\n".join(f"$ {step}\n{text}" for step, text in zip(steps, texts, strict=True))
        return Judged(case.name, case.verdict, code, faults, shown, case.why)


@cache
def _stored() -> Path:
    """The store that a run of the good suite leaves."""
    folder = Path(tempfile.mkdtemp(prefix="mistake-"))
    (folder / "evals.py").write_text(GOOD["evals.py"], encoding="utf-8")
    code, text = _step(Mistake("", GOOD, RAN, 0, (), ""), RAN, folder, folder / "output", "")
    if code:
        raise RuntimeError(text)
    return folder / ".fairtrial"


def _step(case: Mistake, step: str, folder: Path, output: Path, until: str) -> tuple[int, str]:
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith(("FAIRTRIAL", "OPENAI", "GITHUB"))},
        "FAIRTRIAL_CACHE_DIR": str(folder.parent / "cache"), "HOME": str(folder.parent), "COLUMNS": "100",
        "NO_COLOR": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **case.environment,
    }  # fmt: skip
    words = step.split() if "'" not in step and '"' not in step else shlex.split(step)
    while words and "=" in words[0] and words[0].partition("=")[0].isidentifier():
        key, _, value = words.pop(0).partition("=")
        environment[key] = value
    with output.open("wb") as out:
        pid = os.fork()
        if pid == 0:
            _as_child(partial(_become, words, step, folder, environment, out.fileno()))
        code = _wait(pid, output, until, SECONDS * (5 if case.slow else 1))
    return code, output.read_text(encoding="utf-8", errors="replace")


def _wait(pid: int, output: Path, until: str, seconds: float) -> int:
    """Wait for a process, and interrupt it once its output has a text."""
    deadline = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if until and until in output.read_text(encoding="utf-8", errors="replace"):
            os.killpg(pid, signal.SIGINT)
            until = ""
        if time.monotonic() > deadline:
            os.killpg(pid, signal.SIGKILL)
        time.sleep(0.01)


def _as_child(work: Callable[[], None]) -> NoReturn:
    """Do something in a new process, which then ends."""
    code = 1
    try:
        work()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _become(words: list[str], step: str, folder: Path, environment: Mapping[str, str], out: int) -> None:
    os.setpgid(0, 0)
    os.chdir(folder)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ.clear()
    os.environ.update(environment)
    if any(word in step for word in ("|", ";", ">", "<", "$(")) or words[0] not in ("fairtrial", "python"):
        os.execvpe("bash", ["bash", "-c", step], dict(environment))
    for name in [name for name in sys.modules if name == "tests" or name.startswith("tests.")]:
        del sys.modules[name]
    sys.path[:] = [path for path in sys.path if path and not (Path(path) / "tests" / "first_hour").is_dir()]
    sys.argv = words
    if words[0] == "fairtrial":
        from fairtrial.cli import main

        main()
    elif words[1] == "-m":
        sys.path.insert(0, str(folder))
        sys.argv = words[2:]
        runpy.run_module(words[2], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(folder))
        sys.argv = words[1:]
        runpy.run_path(words[1], run_name="__main__")
