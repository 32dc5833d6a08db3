"""Suites whose behaviour depends on one value, `V`, each in another way; and suites with state that says nothing.

As a program, it prints the identity of each suite before and after `V` has changed, as JSON:

    python -c "from tests.runs.identity_kinds import main; main()" FOLDER FORM
    python -c ... FOLDER FORM STORE interrupt       # runs the stable suites

FORM is how the code is executed: `typed` (in no file, as in a console), `cell` (of a notebook), `module` or `script`.
"""

# ruff: noqa: E501 - a row of the table is easier to read in one line

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import json
import os
import runpy
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HEAD = """
import functools, re, os, json, pathlib
from fairtrial import *
"""
READ = "V = json.loads(pathlib.Path(__file__).with_name('value.dat').read_text())\n"
TAIL = """
suite = EvalSuite(SUITE, Dataset.of({"a": "a", "b": "b", "c": "c"}), globals().get("task", str),
                  globals().get("judge", exact_match), adapter=globals().get("adapter"),
                  lifespan=globals().get("lifespan"), experiments=globals().get("experiments", ()),
                  config=EvalConfig(max_concurrent=1))
"""


@dataclass(frozen=True)
class Kind:
    """One way to depend on `V`.

    Attributes:
        code: Defines `task`, `judge` or both. `@` is replaced by the value, so that the source itself changes.
        before: The value of `V`.
        after: The value after the change.
        named: What a warning names, if the change does not start a new run.
        files: Further files in the folder of the code.
    """

    code: str
    before: Any = "a"
    after: Any = "b"
    named: str = ""
    files: dict[str, str] = field(default_factory=dict)


def closure(value: str, head: str = "") -> Kind:
    """A task that has a value in its closure."""
    return Kind(
        f"{head}\ndef make(held):\n    def task(x): return str(held) + x\n    return task\ntask = make({value})"
    )


def used(value: str, head: str = "") -> Kind:
    """A task that uses a global value."""
    return Kind(f"{head}\nHELD = {value}\ndef task(x): return str(HELD) + x")


KINDS: dict[str, Kind] = {
    # Values in closures.
    "text": closure("V"),
    "dict": closure("{'prompt': V}"),
    "key of a dict": closure("{V: 1}"),
    "list": closure("[V]"),
    "nested containers": closure("[{'a': ({'b': [V]},)}]"),
    "tuple of dicts": closure("({'a': V},)"),
    "set": closure("{V, 'x', 'y'}"),
    "frozenset": closure("frozenset([V, 'x'])"),
    "set of tuples": closure("{(V, 1), ('x', 2)}"),
    "deque": closure("collections.deque([V])", "import collections"),
    "number or text": Kind(closure("V").code, 1.0, "1.0"),
    "number or truth": Kind(closure("V").code, 1, True),
    "whole number or fraction": Kind(closure("V").code, 1, 1.0),
    "nothing or empty": Kind(closure("V").code, None, ""),
    "large number": closure("10 ** 40 + len(V * ord(V))"),
    "bytes": closure("V.encode()"),
    "bytearray": closure("bytearray(V.encode())"),
    "control characters": closure("'\\n\\x00\\ud800' + V"),
    "deeply nested list": closure("functools.reduce(lambda inner, _: [inner], range(200), V)"),
    "recursive list": Kind(closure("held").code.replace("task = make", "held = [V]; held.append(held)\ntask = make")),
    "date": closure("datetime.date(2020, 1, ord(V) - 90)", "import datetime"),
    "time zone": closure("datetime.timezone(datetime.timedelta(hours=ord(V) - 90))", "import datetime"),
    "duration": closure("datetime.timedelta(ord(V))", "import datetime"),
    "decimal": closure("decimal.Decimal(ord(V))", "import decimal"),
    "fraction": closure("fractions.Fraction(1, ord(V))", "import fractions"),
    "UUID": closure("uuid.uuid5(uuid.NAMESPACE_DNS, V)", "import uuid"),
    "complex number": closure("complex(ord(V), 1)"),
    "range": closure("range(ord(V))"),
    "slice": closure("slice(ord(V))"),
    "path": closure("pathlib.PurePosixPath('/data') / V"),
    "pattern": closure("re.compile(V)"),
    "flags of a pattern": closure("re.compile('x', re.I if V == 'a' else 0)"),
    "enumeration": closure("E.ONE", "import enum\nclass E(enum.Enum): ONE = V"),
    "namespace": closure("types.SimpleNamespace(prompt=V)", "import types"),
    "read-only mapping": closure("types.MappingProxyType({'a': V})", "import types"),
    "chain of mappings": closure("collections.ChainMap({'a': V}, {})", "import collections"),
    "default dict": closure("collections.defaultdict(list, {'a': V})", "import collections"),
    "counter of words": closure("collections.Counter([V])", "import collections"),
    "order of a dict": closure("{'a': 1, 'b': 2} if V == 'a' else {'b': 2, 'a': 1}"),
    "named tuple": closure("P(V)", "import typing\nclass P(typing.NamedTuple):\n    prompt: str"),
    "exception": closure("ValueError(V)"),
    "template of the standard library": closure("string.Template(V)", "import string"),
    "getter of an item": closure("operator.itemgetter(V)", "import operator"),
    "method of a text": closure("V.join"),
    "array": closure("numpy.array([ord(V)])", "import numpy"),
    # Composition.
    "keyword of a partial": Kind("def ask(x, config): return x\ntask = functools.partial(ask, config={'p': V})"),
    "argument of a partial": Kind("def ask(config, x): return x\ntask = functools.partial(ask, [V])"),
    "partial of a partial": Kind("def ask(a, b, x): return x\ntask = functools.partial(functools.partial(ask, V), 1)"),
    "bound object": Kind("class A:\n    def __init__(self, p): self.p = p\n    def run(self, x): return self.p\ntask = A(V).run"),
    "list of a bound object": Kind("class A:\n    def __init__(self, p): self.p = [p]\n    def run(self, x): return x\ntask = A(V).run"),
    "callable object": Kind("class A:\n    def __init__(self, p): self.p = p\n    def __call__(self, x): return self.p\ntask = A(V)"),
    "object with slots": Kind("class A:\n    __slots__ = ('p',)\n    def __init__(self, p): self.p = p\n    def __call__(self, x): return x\ntask = A(V)"),
    "object in an object": Kind("class B:\n    pass\nclass A:\n    def __init__(self): self.b = B(); self.b.p = V\n    def __call__(self, x): return x\ntask = A()"),
    "object in a list": Kind("class B:\n    pass\nb = B(); b.p = V\nITEMS = [b]\ndef task(x): return ITEMS[0].p"),
    "object in a set": Kind("class B:\n    pass\nb = B(); b.p = V\nITEMS = {b}\ndef task(x): return x and ITEMS"),
    "dataclass": Kind("import dataclasses\n@dataclasses.dataclass\nclass A:\n    p: str\n    def __call__(self, x): return self.p\ntask = A(V)"),
    "frozen dataclass": Kind("import dataclasses\n@dataclasses.dataclass(frozen=True)\nclass A:\n    p: str\n    def __call__(self, x): return self.p\ntask = A(V)"),
    "default of a field": Kind("import dataclasses\n@dataclasses.dataclass\nclass A:\n    p: str = V\ndef task(x): return A().p"),
    "factory of a field": Kind("import dataclasses\n@dataclasses.dataclass\nclass A:\n    p: list = dataclasses.field(default_factory=lambda: [V])\ndef task(x): return A().p"),
    "pydantic model": Kind("import pydantic\nclass C(pydantic.BaseModel):\n    p: str = 'x'\nHELD = C(p=V)\ndef task(x): return HELD.p"),
    "default of a pydantic model": Kind("import pydantic\nclass C(pydantic.BaseModel):\n    p: str = V\ndef task(x): return C().p"),
    "own identity": Kind("class A:\n    def __fairtrial_identity__(self): return {'p': V}\n    def __call__(self, x): return x\ntask = A()"),
    # Classes.
    "class attribute": Kind("class A:\n    LIMIT = V\n    def __call__(self, x): return self.LIMIT\ntask = A()"),
    "attribute of a base class": Kind("class B:\n    LIMIT = [V]\nclass A(B):\n    def __call__(self, x): return self.LIMIT\ntask = A()"),
    "attribute of a metaclass": Kind("class M(type):\n    LIMIT = V\nclass A(metaclass=M):\n    def __call__(self, x): return type(self).LIMIT\ntask = A()"),
    "static method": Kind("class A:\n    @staticmethod\n    def limit(): return V\n    def __call__(self, x): return self.limit()\ntask = A()"),
    "class method": Kind("class A:\n    @classmethod\n    def limit(cls): return V\n    def __call__(self, x): return self.limit()\ntask = A()"),
    "property": Kind("class A:\n    @property\n    def limit(self): return V\n    def __call__(self, x): return self.limit\ntask = A()"),
    "cached property": Kind("class A:\n    @functools.cached_property\n    def limit(self): return V\n    def __call__(self, x): return self.limit\ntask = A()"),
    "method of a base class": Kind("class B:\n    def limit(self): return V\nclass A(B):\n    def __call__(self, x): return self.limit()\ntask = A()"),
    "class that is called": Kind("class A:\n    def __init__(self): self.p = V\ndef task(x): return A().p"),
    # Functions.
    "global number": Kind("LIMIT = ord(V)\ndef task(x): return LIMIT"),
    "global truth": Kind("STRICT = V == 'a'\ndef task(x): return STRICT"),
    "global dict": used("{'a': V}"),
    "global object": used("A()", "class A:\n    pass\nA.p = V"),
    "global of a helper": Kind("def helper(x): return V\ndef task(x): return helper(x)"),
    "global of a helper's helper": Kind("def third(x): return V\ndef second(x): return third(x)\ndef task(x): return second(x)"),
    "function under functools.cache": Kind("@functools.cache\ndef task(x): return V"),
    "helper under functools.lru_cache": Kind("@functools.lru_cache(maxsize=9)\ndef helper(x): return V\ndef task(x): return helper(x)"),
    "size of a cache": Kind("task = functools.lru_cache(maxsize=ord(V))(lambda x: x)"),
    "wrapped function": Kind("def deco(f):\n    @functools.wraps(f)\n    def inner(x): return f(x)\n    return inner\n@deco\ndef task(x): return V"),
    "argument of a decorator": Kind("def deco(times):\n    def outer(f):\n        @functools.wraps(f)\n        def inner(x): return f(x) * times\n        return inner\n    return outer\n@deco(ord(V))\ndef task(x): return x"),
    "decorator that is a class": Kind("class deco:\n    def __init__(self, f): functools.update_wrapper(self, f)\n    def __call__(self, x): return self.__wrapped__(x)\n@deco\ndef task(x): return V"),
    "attribute of a function": Kind("def task(x): return task.prompt\ntask.prompt = V"),
    "default argument": Kind("def task(x, ctx=None, *, p=V): return p"),
    "lambda in a dict": Kind("TABLE = {'a': lambda x: V}\ndef task(x): return TABLE['a'](x)"),
    "list of functions": Kind("def one(x): return V\nSTEPS = [one]\ndef task(x): return STEPS[0](x)"),
    "asynchronous task": Kind("async def task(x): return V"),
    "inner function": Kind("def task(x):\n    def inner(): return V\n    return inner()"),
    "assigned global": Kind("count = ord(V)\ndef task(x):\n    global count\n    count += 1\n    return count"),
    "code of the task": Kind("def task(x): return '@'"),
    "code of a lambda": Kind("task = lambda x: '@'"),
    "code of a helper": Kind("def helper(x): return '@'\ndef task(x): return helper(x)"),
    "code of a base class": Kind("class B:\n    def limit(self): return '@'\nclass A(B):\n    def __call__(self, x): return self.limit()\ntask = A()"),
    "return type": Kind("def task(x) -> @: return x", "int", "str"),
    # Modules.
    "member of a module": Kind("import conf_a\ndef task(x): return conf_a.LIMIT", files={"conf_a.py": HEAD + READ + "LIMIT = [V]"}),
    "function of a module": Kind("import conf_b\ndef task(x): return conf_b.helper(x)", files={"conf_b.py": HEAD + READ + "def helper(x): return V"}),
    "imported function": Kind("from conf_c import helper\ndef task(x): return helper(x)", files={"conf_c.py": HEAD + READ + "def helper(x): return V"}),
    "submodule": Kind("import pack_a.inner\ndef task(x): return pack_a.inner.LIMIT", files={"pack_a/__init__.py": "", "pack_a/inner.py": HEAD + "V = json.loads(pathlib.Path(__file__).parents[1].joinpath('value.dat').read_text())\nLIMIT = V"}),
    "module imported in a function": Kind("def task(x):\n    import late_a\n    return late_a.h(x)", files={"late_a.py": "def h(x): return '@'"}),
    "name imported in a function": Kind("def task(x):\n    from late_b import h\n    return h(x)", files={"late_b.py": "def h(x): return '@'"}),
    "submodule imported in a function": Kind("def task(x):\n    from pack_b import inner\n    return inner.h(x)", files={"pack_b/__init__.py": "", "pack_b/inner.py": "def h(x): return '@'"}),
    "module of a module imported in a function": Kind("def task(x):\n    import late_c\n    return late_c.h(x)", files={"late_c.py": "from late_d import h", "late_d.py": "def h(x): return '@'"}),
    "module imported by a function call": Kind("import importlib\ndef task(x): return importlib.import_module('late_e').h(x)", files={"late_e.py": "def h(x): return '@'"}),
    # The surroundings.
    "variable read at import": Kind("WORD = os.environ.get('KINDS_WORD')\ndef task(x): return WORD"),
    "variable read by the task": Kind("def task(x): return os.environ['KINDS_WORD']", named="$KINDS_WORD"),
    "variable that the task asks for": Kind("def task(x): return os.getenv('KINDS_WORD')", named="$KINDS_WORD"),
    "prompt read at import": Kind("PROMPT = pathlib.Path(os.environ['KINDS_FOLDER'], 'word.txt').read_text()\ndef task(x): return PROMPT"),
    "prompt read by the task": Kind("def task(x): return open('word.txt').read()", named="word.txt"),
    "port of a local server": Kind("URL = 'http://127.0.0.1:80%d/v1' % ord(V)\ndef task(x): return URL", named="URL"),
    "name in the temporary folder": Kind("import tempfile\nFILE = tempfile.gettempdir() + '/stable-' + V\ndef task(x): return FILE", named="FILE"),
    "object of a library": Kind("import email.policy\nHELD = email.policy.EmailPolicy(max_line_length=ord(V))\ndef task(x): return HELD", named="email.policy.EmailPolicy"),
    "iterator": Kind("HELD = iter([V])\ndef task(x): return HELD", named="list_iterator"),
    # What Fairtrial itself offers.
    "evaluator's closure": Kind("def make(w):\n    def judge(output, expected): return output == w\n    return judge\njudge = make({'a': V})"),
    "evaluator's global": Kind("LIMIT = {'a': V}\ndef judge(output, expected): return output == LIMIT"),
    "evaluator's object": Kind("class J:\n    def __init__(self, by): self.by = by\n    def __call__(self, output, expected): return self.by\njudge = J([V])"),
    "nested evaluators": Kind("judge = functools.reduce(lambda e, _: negate(e), range(12), matches(V))"),
    "threshold": Kind("judge = threshold(exact_match, ord(V) / 1000)"),
    "weights": Kind("judge = weighted((exact_match, ord(V)), (matches('x'), 1))"),
    "criterion of a judge": Kind("from fairtrial.models.judges import llm_judge\nfrom fairtrial.models import ScriptedAdapter\njudge = llm_judge(ScriptedAdapter(['{}']), V)"),
    "model of a judge": Kind("from fairtrial.models.judges import llm_judge\nfrom fairtrial.models import ScriptedAdapter\njudge = llm_judge(ScriptedAdapter(['{}'], model=V), 'x')"),
    "parameters of an adapter": Kind("from fairtrial.models import ScriptedAdapter\nadapter = ScriptedAdapter(['x'], params={'temperature': ord(V)})"),
    "replies of an adapter": Kind("from fairtrial.models import ScriptedAdapter\nadapter = ScriptedAdapter([V])"),
    "adapter of a task": Kind("from fairtrial.models import ScriptedAdapter\nm = ScriptedAdapter(['x'], model=V)\ndef task(x): return m.model"),
    "lifespan": Kind("import contextlib\n@contextlib.contextmanager\ndef lifespan(): yield V"),
    "task of an experiment": Kind("def make(p):\n    def t(x): return p\n    return t\nexperiments = [Experiment('one', task=make('x')), Experiment('two', task=make(V))]"),
}  # fmt: skip


def state(value: str, head: str = "") -> str:
    """A task that uses an object which says nothing about what it does."""
    return used(value, head).code


# Suites that are the same in every process, folder and machine, and on every day.
STABLE: dict[str, str] = {
    "lock": state("threading.Lock()", "import threading"),
    "reentrant lock": state("threading.RLock()", "import threading"),
    "event": state("threading.Event()", "import threading"),
    "semaphore": state("threading.Semaphore(3)", "import threading"),
    "asynchronous lock": state("asyncio.Lock()", "import asyncio"),
    "asynchronous semaphore": state("asyncio.Semaphore(3)", "import asyncio"),
    "queue": state("queue.Queue()", "import queue"),
    "thread-local values": state("threading.local()", "import threading"),
    "pool of threads": state("concurrent.futures.ThreadPoolExecutor(1)", "import concurrent.futures"),
    "logger": state("logging.getLogger('x')", "import logging"),
    "open file": state("open(os.devnull)"),
    "buffer": state("io.StringIO()", "import io"),
    "socket": state("socket.socket()", "import socket"),
    "database": state("sqlite3.connect(':memory:')", "import sqlite3"),
    "context variable": state("contextvars.ContextVar('x')", "import contextvars"),
    "weak reference": state("weakref.ref(state)", "import weakref\ndef state(): pass"),
    "weak dictionary": state("weakref.WeakValueDictionary()", "import weakref"),
    "counter": state("itertools.count()", "import itertools"),
    "generator": state("(x for x in [os.getpid()])"),
    "sentinel": state("object()"),
    "random generator": state("random.Random()", "import random"),
    "temporary folder": state("tempfile.mkdtemp()", "import tempfile"),
    "file in a temporary folder": state("pathlib.Path(tempfile.mkdtemp()) / 'x.db'", "import tempfile"),
    "temporary file": state("tempfile.mkstemp(suffix='.db')[1]", "import tempfile"),
    "temporary folder as an object": state("tempfile.TemporaryDirectory()", "import tempfile"),
    "path of the project": state("str(pathlib.Path(os.environ['KINDS_FOLDER'], 'x', 'y'))"),
    "URL with the project's path": state("'sqlite:///' + str(pathlib.Path(os.environ['KINDS_FOLDER'], 'x.db'))"),
    "path of the user": state("pathlib.Path.home() / 'cache'"),
    "name of the module": "def task(x): return __name__ + str(globals().get('__file__'))",
    "set of texts": state("{'a', 'b', 'c', 'd', 'e'}"),
    "set of tuples": state("{('a', 1), ('b', 2), ('c', 3)}"),
    "set of functions": state("{one, two}", "def one(): pass\ndef two(): pass"),
    "set of types": state("{int, str, float, bytes}"),
    "constant set": "def task(x): return x in {'a', 'b', 'c', 'd'}",
    "key by name": "API_KEY = os.environ['KINDS_RENEWED']\ndef task(x): return API_KEY",
    "key by the name of an attribute": "class C:\n    def __init__(self): self.api_key = os.environ['KINDS_RENEWED']\n    def __call__(self, x): return x\ntask = C()",
    "key in a dict": state("{'api_key': os.environ['KINDS_RENEWED']}"),
    "key in a closure": closure("os.environ['KINDS_API_KEY']").code,
    "key in a header": state("{'Authorization': 'Bearer ' + os.environ['KINDS_API_KEY']}"),
    "key in a URL": state("'https://me:' + os.environ['KINDS_API_KEY'] + '@example.org'"),
    "key as bytes": state("os.environ['KINDS_API_KEY'].encode()"),
    "key of a partial": "def ask(x, token): return x\ntask = functools.partial(ask, token=os.environ['KINDS_RENEWED'])",
    "key of a pydantic model": state("S(key=os.environ['KINDS_RENEWED'])", "import pydantic\nclass S(pydantic.BaseModel):\n    key: pydantic.SecretStr"),
    "environment": state("os.environ"),
    "filled cache": "@functools.cache\ndef cached(x): return x\ncached(os.getpid())\ndef task(x): return cached(x)",
    "adapter with calls": "from fairtrial.models import ScriptedAdapter\nm = ScriptedAdapter(['x'])\ndef task(x): return m",
    "module of a library": "import random, time\ndef task(x): return random.random() + time.time()",
    "another suite": "other = EvalSuite('o', Dataset.of({'a': 'a'}), str, exact_match)\ndef task(x): return other.name",
}  # fmt: skip


def write(folder: Path, kind: Kind, value: Any) -> str:
    """Write the files of a kind, and return its code."""
    (folder / "value.dat").write_text(json.dumps(value))
    (folder / "word.txt").write_text(str(value))
    os.environ["KINDS_WORD"] = str(value)
    for name, text in kind.files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text.replace("@", str(value)) if "@functools" not in text else text)
    return kind.code if "@" not in kind.code or _decorated(kind.code) else kind.code.replace("@", str(value))


def _decorated(code: str) -> bool:
    return any(line.strip().startswith("@") for line in code.splitlines())


def execute(folder: Path, form: str, code: str, value: Any, name: str) -> Any:
    """Execute code that makes a suite, and return the suite."""
    end = TAIL.replace("SUITE", repr(name))
    if form == "typed":
        space: dict[str, Any] = {"__name__": "__main__", "V": value}
        exec(compile(HEAD + code + end, "<stdin>", "exec", dont_inherit=True), space)
        return space["suite"]
    if form == "cell":
        from IPython.core.getipython import get_ipython

        shell: Any = get_ipython()
        for other in ("task", "judge", "adapter", "lifespan", "experiments"):
            shell.user_ns.pop(other, None)
        shell.user_ns["V"] = value
        shell.run_cell(HEAD + code + end).raise_error()
        return shell.user_ns["suite"]
    file = folder / f"{name}.py"
    file.write_text(HEAD + READ + code + end)
    if form == "script":
        return runpy.run_path(str(file), run_name="__main__")["suite"]
    return importlib.import_module(name).suite


def forget(folder: Path) -> None:
    """Remove the modules of a folder, as a new process would have none of them."""
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(folder)):
            del sys.modules[name]
    importlib.invalidate_caches()


def identity(suite: Any) -> dict[str, Any]:
    """Return what is compared of a suite."""
    code = suite.prepared().code
    return {"identity": [code.evaluator, code.code], "unknown": list(code.unknown), "reads": dict(code.reads)}


@contextlib.contextmanager
def project(folder: Path) -> Any:
    """Prepare a folder as a project."""
    evals = folder / "evals"
    evals.mkdir(parents=True)
    (folder / "pyproject.toml").write_text("")
    os.environ["KINDS_FOLDER"] = str(evals)
    sys.path.insert(0, str(evals))
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield evals
    finally:
        sys.path.remove(str(evals))
        sys.dont_write_bytecode = before
        forget(folder)


def identities(folder: Path, form: str) -> dict[str, list[dict[str, Any]]]:
    """Return the identities of all suites, before and after the change; those of stable suites twice."""
    found: dict[str, list[dict[str, Any]]] = {}
    with project(folder) as evals, contextlib.chdir(evals if form in ("typed", "cell") else "."):
        for number, (name, kind) in enumerate(KINDS.items()):
            found[name] = []
            for value in (kind.before, kind.after):
                code = write(evals, kind, value)
                found[name].append(identity(execute(evals, form, code, value, f"kind_{number}")))
                forget(folder)
        for name, suite in stable_suites(evals, form):
            found[f"stable: {name}"] = [identity(suite)]
    gc.collect()  # Temporary folders are removed here, not in a later test.
    return found


def stable_suites(evals: Path, form: str) -> Iterator[tuple[str, Any]]:
    """Yield the stable suites by name, each as a new process would make it."""
    for number, (name, code) in enumerate(STABLE.items()):
        write(evals, Kind(code), "a")
        yield name, execute(evals, form, code, "a", f"stable_{number}")
        forget(evals)


class Starts:
    """Records the samples whose trials start, and interrupts the run at the second one."""

    def __init__(self, interrupt: bool) -> None:
        self.seen: list[str] = []
        self._task = asyncio.current_task() if interrupt else None

    def publish(self, event: Any) -> None:
        if type(event).__name__ == "TrialStarted":
            self.seen.append(event.key.sample_id)
            if len(self.seen) == 2 and self._task is not None:
                self._task.cancel()


async def run_stable(folder: Path, form: str, url: str, interrupt: bool) -> dict[str, list[Any]]:
    """Run or resume all stable suites: (number of the run, its status, the trials executed, the executions stored)."""
    from fairtrial import open_store

    async def run(suite: Any) -> list[Any]:
        starts = Starts(interrupt)
        with contextlib.suppress(asyncio.CancelledError):
            await suite.run(store=store, bus=starts)
        run = store.runs(suite=suite.name)[0]
        stored = {result.sample_id: result.execution for result in store.results(run.run_id)}
        return [run.number, run.status, starts.seen, stored]

    store = open_store(url)
    with project(folder) as evals:
        found = {name: await asyncio.create_task(run(suite)) for name, suite in stable_suites(evals, form)}
    store.close()
    return found


def main() -> None:
    """Print the identities of all suites; or, given a store, run the stable ones, to be interrupted or resumed."""
    folder, form, *given = sys.argv[1:]
    if given:
        print(json.dumps(asyncio.run(run_stable(Path(folder), form, given[0], given[1] == "interrupt"))))
    else:
        print(json.dumps(identities(Path(folder), form)))
