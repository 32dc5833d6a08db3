"""The application: its commands in groups, and the boundary where errors become messages."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from keyword import iskeyword
from typing import Annotated, Any, cast

import typer
from typer.core import TyperGroup

from fairtrial.cli.user_errors import ExitCode, report_error

GROUPS: dict[str, tuple[str, ...]] = {
    "Start": ("init", "plan", "try", "run"),
    "Look": ("runs", "show", "trials", "view"),
    "Decide": ("compare", "leaderboard", "gate", "calibrate"),
    "Keep": ("rescore", "import", "export", "store", "doctor"),
    "Fleet": ("worker", "fleet"),
}


class Grouped(TyperGroup):
    """A command group whose help lists the commands by purpose."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the commands in the order of their groups."""
        return [name for names in GROUPS.values() for name in names if name in self.commands]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write one help section for each group, with aligned columns."""
        width = max(len(name) for name in self.commands)
        for title, names in GROUPS.items():
            rows = [
                (name.ljust(width), self.commands[name].get_short_help_str(formatter.width - width - 6))
                for name in names
                if name in self.commands
            ]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


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
def command_tree(name: str = "") -> TyperGroup:
    """Build the application: with the one command that is named, or else with all of them.

    Reading the options of all commands takes longer than many commands do.
    """
    app = _app(name="fairtrial", cls=Grouped, no_args_is_help=True)
    app.callback()(root)
    names = [command for commands in GROUPS.values() for command in commands]
    for command in [name] if name in names else names:
        module = import_module(f"fairtrial.cli.command_{command}")
        if group := getattr(module, "app", None):
            app.add_typer(group, name=command)
        else:
            app.command(command, cls=getattr(module, "Command", None))(
                getattr(module, f"{command}_" if iskeyword(command) else command)
            )
    return cast("TyperGroup", typer.main.get_command(app))


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
        return _invoke(command_tree(arguments[0] if arguments else ""), arguments, "fairtrial", debug=debug)
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


# Options that people expect of a command, and the command that does what they mean.
_MODELS = "fairtrial try FILE:NAME --dataset FILE --evaluator NAME --model NAME --model NAME"
_ELSEWHERE = {
    **{
        (command, option): _MODELS
        for command in ("compare", "run")
        for option in ("--prompt", "--models", "--model", "--dataset", "--evaluator")
    },
    ("export", "--run-id"): "fairtrial export RUN --format csv",
}


def _usage(error: typer.TyperException) -> int:
    from fairtrial.cli.screen import err, sentence

    context = getattr(error, "ctx", None)
    message = error.format_message()
    if message.startswith("Usage:"):  # Called without arguments: the message is the help.
        typer.echo(message, err=True)
        return int(ExitCode.USAGE)
    option = str(getattr(error, "option_name", ""))
    hint = None if context is None else _ELSEWHERE.get((context.info_name, option))
    if hint is not None:
        message = message.partition(" (Possible options:")[
            0
        ]  # Options with a similar spelling are rarely what was meant.
    sentence(err(), f"error: {message[:1].lower()}{message[1:]}", style="bold red")
    if context is not None:
        if hint is not None:
            sentence(err(), f"  use: {hint}")
        sentence(err(), f"  see: {context.command_path} --help")
    return int(ExitCode.USAGE)
