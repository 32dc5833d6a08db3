"""The application: its commands in groups, and the boundary where errors become messages."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from keyword import iskeyword
from typing import Annotated, Any, cast

import typer
from typer.core import TyperCommand, TyperGroup

from fairtrial.cli.user_errors import ExitCode, report_error

GROUPS: dict[str, dict[str, str]] = {
    "Start": {
        "init": "Write a suite for what a folder has, or a small project.",
        "plan": "Plan a comparison: how many samples it needs, and their cost.",
        "try": "Try one prompt: every sample with every model.",
        "run": "Run suites: every sample in every experiment.",
        "improve": "Search for a better prompt; test it on samples it never saw.",
    },
    "Look": {
        "runs": "List runs, newest first.",
        "show": "Show the report of a run, its slices, or one trial in full.",
        "batches": "List a run's batches at model providers; cancel them.",
        "trials": "List trials, with input and output side by side.",
        "view": "Show runs, trials and comparisons as pages in a browser.",
        "serve": "Serve the projects of a team: sign-in, roles, an audit.",
    },
    "Decide": {
        "compare": "Compare candidates with a baseline, sample by sample.",
        "leaderboard": "Rank systems on the same samples, with rank intervals.",
        "gate": "Decide from intervals whether a run passes: exit 0, 1 or 3.",
        "calibrate": "Compare a judge's scores with people's labels.",
        "watch": "Watch daily runs: an alarm when quality has dropped.",
    },
    "Keep": {
        "dataset": "Collect failed trials as samples; compare versions.",
        "rescore": "Score the stored outputs of a run again; no task is called.",
        "import": "Import runs, datasets and graders from another tool.",
        "export": "Write a run to a file: results, report, or everything.",
        "store": "Maintain the store: contents, schema, old runs, backups.",
        "doctor": "Check installation, settings, store and queue.",
    },
    "Fleet": {
        "worker": "Run the trials of a suite from a queue until stopped.",
        "fleet": "Show the queues, workers and dead letters of a fleet.",
    },
}
"""The commands by their purpose, each with its short help: nothing of a command is loaded to list it."""


class Grouped(TyperGroup):
    """A command group whose help lists the commands by purpose."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the commands in the order of their groups."""
        return [name for names in GROUPS.values() for name in names]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write one help section for each group, with aligned columns."""
        width = max(len(name) for name in self.commands)
        for title, names in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), text) for name, text in names.items()])


def _version(asked: bool) -> None:
    if asked:
        from fairtrial._version import __version__

        typer.echo(f"fairtrial {__version__}")
        raise typer.Exit(0)


def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_version)
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks (accepted anywhere on the command line).")
    ] = False,
) -> None:
    """Evaluate prompts, agents and models, and get numbers you can defend.

    \b
    Examples:
      fairtrial init demo && cd demo      create a project that runs as it is
      fairtrial run                       run it (after Ctrl-C: resume it)
      fairtrial show support              show the report of its latest run
      fairtrial trials support --failed   list failed trials and why

    Exit codes: 0 success, 1 a gate or floor was not met, 2 invalid command, file or setting, 3 inconclusive,
    4 too many trials ended in an error, 5 finished without a report, 70 internal error in Fairtrial, 130 interrupted.
    """


@cache
def command_tree(name: str | None = None) -> TyperGroup:
    """Build the application: with all commands, or with one that can be called and others that can only be listed.

    Loading all commands takes longer than many commands do.
    """
    app = _app(name="fairtrial", cls=Grouped, no_args_is_help=True)
    app.callback()(root)
    short_helps = {command: text for commands in GROUPS.values() for command, text in commands.items()}
    for command in short_helps:
        if name not in (None, command):
            continue
        module = import_module(f"fairtrial.cli.command_{command}")
        if group := getattr(module, "app", None):
            app.add_typer(group, name=command)
        else:
            app.command(command, cls=getattr(module, "Command", None))(
                getattr(module, f"{command}_" if iskeyword(command) else command)
            )
    made = cast("TyperGroup", typer.main.get_command(app))
    for command, text in short_helps.items():
        if command not in made.commands:
            made.add_command(TyperCommand(command, help=text))
    return made


def _app(**how: Any) -> typer.Typer:
    context: dict[Any, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
    return typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, context_settings=context, **how)


def _program(command: Callable[..., int]) -> Any:
    """Build the application of one function."""
    app = _app(add_completion=False)
    app.command()(command)
    return typer.main.get_command(app)


def invoke(arguments: Sequence[str], program: Callable[..., int] | None = None) -> int:
    """Run one command, or a function that is a program of its own, and return its exit code; never raises."""
    debug = "--debug" in arguments or bool(os.environ.get("FAIRTRIAL_DEBUG"))
    arguments = [argument for argument in arguments if argument != "--debug"]
    try:
        if program is not None:
            return _invoke(_program(program), arguments, f"python -m fairtrial.cli.{program.__name__}", debug=debug)
        called = next((argument for argument in arguments if not argument.startswith("-")), "")
        completed = "_FAIRTRIAL_COMPLETE" in os.environ  # Then the words are in the environment.
        return _invoke(command_tree(None if completed else called), arguments, "fairtrial", debug=debug)
    finally:
        if (screen := sys.modules.get("fairtrial.cli.screen")) is not None:  # Not loaded: nothing was logged.
            screen.stop_logging()


def _invoke(command: Any, arguments: Sequence[str], name: str, *, debug: bool) -> int:
    try:
        code = command.main(arguments, prog_name=name, standalone_mode=False, obj=tuple(arguments))
        sys.stdout.flush()
    except typer.TyperException as error:
        return _usage(error)
    except typer.Abort:
        return int(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        # The reader closed the pipe (`| head`): not an error, and nothing more can be written.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return int(ExitCode.OK)
    except KeyboardInterrupt:
        return int(ExitCode.INTERRUPTED)
    except Exception as error:
        return int(report_error(error, debug=debug))
    return int(code or 0)


# Words that people know from other tools, or from what these were called before, and what does the same here.
_COMMANDS = {
    **dict.fromkeys(("failures", "failed", "errors"), "fairtrial trials RUN --failed"),
    **dict.fromkeys(("delete", "rm", "remove"), "fairtrial store delete RUN"),
    **{name: f"fairtrial store {name}" for name in ("prune", "vacuum", "backup", "migrate", "stats")},
    **dict.fromkeys(("list", "ls", "history"), "fairtrial runs"),
    **dict.fromkeys(("eval", "evaluate", "test", "resume", "start"), "fairtrial run SUITE"),
    **dict.fromkeys(("report", "results", "print"), "fairtrial show RUN"),
    **dict.fromkeys(("ui", "web", "server", "open"), "fairtrial view"),
    **dict.fromkeys(("new", "create", "quickstart"), "fairtrial init demo"),
    **dict.fromkeys(("workers", "queue", "queues", "status"), "fairtrial fleet"),
    **dict.fromkeys(("config", "settings"), "fairtrial doctor --settings"),
    "dlq": "fairtrial fleet dlq list",
    "diff": "fairtrial compare BASELINE CANDIDATE",
    "retry": "fairtrial run SUITE --resume errors",
    "version": "fairtrial --version",
    "help": "fairtrial --help",
}
_MODELS = "fairtrial try FILE:NAME --dataset FILE --evaluator NAME --model NAME --model NAME"
_NEW_RUN = "--resume never (a finished run is never resumed: the same command starts a new one)"
_EXPORT = "fairtrial export RUN --output report.html"
_OPTIONS = {
    "run": {
        **dict.fromkeys(("--prompt", "--models", "--model", "--dataset", "--evaluator"), _MODELS),
        **dict.fromkeys(("--new", "--fresh", "--force", "--restart", "--no-resume"), _NEW_RUN),
        **dict.fromkeys(("--retry-errors", "--retry", "--retry-failed"), "--resume errors"),
        **dict.fromkeys(("--limit", "-n", "--num-samples", "--max-examples"), "--max-samples N"),
        **dict.fromkeys(("--max-concurrent", "--max-connections", "--workers", "--parallel", "-j"), "--concurrency N"),
        **dict.fromkeys(("--epochs", "--trials", "--runs"), "--repeats N"),
        **dict.fromkeys(("--threshold", "--min-pass-rate", "--floor"), "--fail-under RATE"),
        **dict.fromkeys(("--output", "-o", "--out", "--format"), _EXPORT),
        **dict.fromkeys(("--redis", "--queue", "--broker"), "--mailbox URL"),
        "--baseline": "fairtrial compare BASELINE CANDIDATE",
        "--no-cache": "--cache off",
        "--timeout": "EvalConfig(timeout_seconds=...) in the suite",
        "--verbose": "--debug",
    },
    "compare": {
        **dict.fromkeys(("--prompt", "--models", "--model", "--dataset", "--evaluator"), _MODELS),
        "--baseline": "fairtrial compare BASELINE CANDIDATE (the first is the baseline)",
    },
    "trials": dict.fromkeys(("--outcome", "--status", "--failures", "--only-failed"), "--failed"),
    "show": {**dict.fromkeys(("--failed", "--failures"), "fairtrial trials RUN --failed"),
             **dict.fromkeys(("--output", "-o", "--format", "--html"), _EXPORT)},
    "gate": dict.fromkeys(("--fail-under", "--min-pass-rate", "--threshold", "--min"), "--floor passed=0.8"),
    "worker": dict.fromkeys(("--redis", "--queue", "--broker", "--url"), "--mailbox URL"),
    "export": {"--run-id": "fairtrial export RUN --format csv"},
}  # fmt: skip
_OPTIONS["try"] = {name: hint for name, hint in _OPTIONS["run"].items() if hint != _MODELS}


def _usage(error: typer.TyperException) -> int:
    from fairtrial.cli.screen import err, sentence

    context = getattr(error, "ctx", None)
    message = error.format_message()
    if message.startswith("Usage:"):  # Called without arguments: the message is the help.
        typer.echo(message, err=True)
        return int(ExitCode.USAGE)
    message, hint = _bad_value(error) or message, None
    if option := str(getattr(error, "option_name", "")):
        message = message.partition(" (Possible options:")[0]  # By the start of their names, rarely what was meant.
        near = _near(option, context)
        hint = _OPTIONS.get(str(getattr(context, "info_name", "")), {}).get(near)
        message += f"; did you mean {near}?" if near and hint is None else ""
    elif found := re.match(r"No such command '([^']+)'", message):
        hint = f"fairtrial run {found[1]}" if found[1].endswith(".py") else _COMMANDS.get(found[1])
        message = message.rstrip(".") if hint is None else f"no such command {found[1]!r}"
    sentence(err(), f"error: {message[:1].lower()}{message[1:]}", style="bold red")
    if context is not None:
        if hint is not None:
            sentence(err(), f"  use: {hint}")
        sentence(err(), f"  see: {context.command_path} --help")
    return int(ExitCode.USAGE)


def _near(option: str, context: Any) -> str:
    """Return the option of a command, or of another tool, that is spelled most like this one."""
    if context is None:
        return ""
    known = [name for param in context.command.get_params(context) for name in param.opts if name.startswith("--")]
    known += _OPTIONS.get(str(context.info_name), {})
    return option if option in known else next(iter(get_close_matches(option.lower().replace("_", "-"), known, 1)), "")


def _bad_value(error: typer.TyperException) -> str:
    """Say what is wrong with the value of an option or an argument, with the value."""
    found: list[dict[str, Any]] = getattr(error.__cause__, "errors", list)()
    if not found:
        return ""
    what, limits, given = found[0]["type"], found[0].get("ctx", {}), found[0]["input"]
    if what.startswith("int_"):
        must = "a whole number"
    elif what == "float_parsing":
        must = "a number"
    elif "ge" in limits:
        must = f"at least {limits['ge']:g}"
    elif "le" in limits:
        share = limits["le"] == 1 and 1 < float(given) <= 100
        must = f"at most {limits['le']:g}" + (
            f", such as {float(given) / 100:g} for {float(given):g}%" if share else ""
        )
    else:
        return ""
    name = param.get_error_hint().replace("'", "") if (param := getattr(error, "param", None)) else "the value"
    return f"{name} must be {must} (got {given!r})"
