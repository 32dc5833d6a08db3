"""The tasks of all three people, what each has read, and the list of them in README.md."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from pathlib import Path

from tests.first_hour import application, operations, research
from tests.first_hour.person import PERSONAS, ROOT, TASKS, Task, pages_needed

__all__ = ["TASKS", "application", "operations", "research"]

LIST = Path(__file__).with_name("README.md")
HEAD = """# What three new users want to do

`scripts/first-hour` does these {count} tasks as programs that use nothing but the installed wheel and what the named
pages say, and checks what must come out. Names of Fairtrial that a program imports must be on a page, or in a file that
`fairtrial init` wrote, which its author has read. Help screens and what commands print are no pages. Together they read
{pages} pages; a page that two people read counts twice. The command prints how many commands were typed.
"""


def texts_read(task: Task) -> str:
    """The text of the pages that this person has read until this task is done."""
    read: list[str] = []
    for other in TASKS:
        if other.number[0] == task.number[0]:
            read += [(ROOT / page).read_text(encoding="utf-8") for page in other.pages]
        if other is task:
            break
    return "\n".join(read)


def commands_of(program: Callable[..., object]) -> list[str]:
    """The commands that a program types, also by helpers of its module; what it only knows later is in braces."""
    module = inspect.getmodule(program)
    commands: list[str] = []
    calls = [node for node in ast.walk(ast.parse(inspect.getsource(program))) if isinstance(node, ast.Call)]
    for node in sorted(calls, key=lambda call: (call.lineno, call.col_offset)):
        helper = getattr(module, node.func.id, None) if isinstance(node.func, ast.Name) else None
        if inspect.isfunction(helper) and helper.__module__ == program.__module__ and helper is not program:
            commands += commands_of(helper)
        elif isinstance(node.func, ast.Attribute) and node.func.attr in ("type", "start"):
            line = node.args[0]
            words = line.values if isinstance(line, ast.JoinedStr) else [line]
            parts = [str(word.value) if isinstance(word, ast.Constant) else "{...}" for word in words]
            commands.append("".join(parts))
    return commands


def list_of_tasks() -> str:
    """The list, with the commands that are typed."""
    needed = pages_needed(TASKS)
    parts = [HEAD.format(count=len(TASKS), pages=sum(map(len, needed.values())))]
    for persona, who in PERSONAS.items():
        parts.append(f"## {persona}: {who}\n")
        for one in TASKS:
            if one.number[0] != persona:
                continue
            pages = ", ".join(f"[{page}](../../{page})" for page in one.pages) or "none that was not read before"
            commands = "\n".join(f"    {line}" for line in commands_of(one.program))
            lines = [f"- wants {one.wants}", f"- must come out: {one.outcome}", f"- pages: {pages}", "- types:"]
            parts.append(f"### {one.number}\n\n" + "\n".join(lines) + f"\n\n{commands}\n")
    return "\n".join(parts)
