"""The application: its commands in groups, and the one boundary where errors become sentences."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from fairtrial.cli import (
    command_calibrate,
    command_compare,
    command_config,
    command_delete,
    command_dlq,
    command_doctor,
    command_export,
    command_failures,
    command_fleet,
    command_gate,
    command_import,
    command_init,
    command_rescore,
    command_run,
    command_runs,
    command_show,
    command_store,
    command_worker,
)
from fairtrial.cli.faults import ExitCode, report_fault

GROUPS: dict[str, tuple[str, ...]] = {
    "Start": ("init", "run"),
    "Look": ("runs", "show", "failures"),
    "Decide": ("compare", "gate", "calibrate"),
    "Keep": ("rescore", "import", "export", "delete", "store", "config", "doctor"),
    "Fleet": ("worker", "fleet", "dlq"),
}


class Grouped(TyperGroup):
    """Lists the commands by what they are for."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The commands in the order of their groups."""
        return [name for names in GROUPS.values() for name in names if name in self.commands]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """One section for each group, aligned with each other."""
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


app = typer.Typer(
    name="fairtrial",
    cls=Grouped,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _version(asked: bool) -> None:
    if asked:
        from fairtrial._version import __version__

        typer.echo(f"fairtrial {__version__}")
        raise typer.Exit(0)


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_version)
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks; may stand anywhere in a command.")] = False,
) -> None:
    """Evaluate prompts, agents and models, and get numbers you can defend.

    \b
    Examples:
      fairtrial init demo && cd demo      a project that runs at once
      fairtrial run                       run it; again after Ctrl-C, it goes on
      fairtrial show support              the report of its latest run
      fairtrial failures support          what went wrong, and why

    Exit codes: 0 fine, 1 a gate or floor was not met, 2 the command or a file is wrong, 3 inconclusive, 4 too many
    trials ended in an error, 70 a fault of Fairtrial's, 130 interrupted.
    """


for _module in (
    command_init,
    command_run,
    command_runs,
    command_show,
    command_failures,
    command_compare,
    command_gate,
    command_calibrate,
    command_rescore,
    command_import,
    command_export,
    command_delete,
    command_store,
    command_config,
    command_doctor,
    command_worker,
    command_fleet,
    command_dlq,
):
    _module.register(app)


def invoke(arguments: Sequence[str]) -> int:
    """Run one command; whatever happens, the code to exit with."""
    debug = "--debug" in arguments or bool(os.environ.get("FAIRTRIAL_DEBUG"))
    arguments = [argument for argument in arguments if argument != "--debug"]
    try:
        return _invoke(arguments, debug=debug)
    finally:
        if (screen := sys.modules.get("fairtrial.cli.screen")) is not None:  # Not loaded: nothing was logged.
            screen.stop_logging()


def _invoke(arguments: Sequence[str], *, debug: bool) -> int:
    command = typer.main.get_command(app)
    try:
        code = command.main(arguments, prog_name="fairtrial", standalone_mode=False, obj=tuple(arguments))
        sys.stdout.flush()
    except typer.TyperException as error:
        return _usage(error)
    except typer.Abort:
        return int(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        # Whoever read our output has seen enough (`| head`): nothing went wrong, and nothing more can be said.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return int(ExitCode.OK)
    except KeyboardInterrupt:
        return int(ExitCode.INTERRUPTED)
    except Exception as error:
        return int(report_fault(error, debug=debug))
    return int(code or 0)


def _usage(error: typer.TyperException) -> int:
    from fairtrial.cli.screen import err, sentence

    context = getattr(error, "ctx", None)
    message = error.format_message()
    if message.startswith("Usage:"):  # Called without arguments: the help is the answer.
        typer.echo(message, err=True)
        return int(ExitCode.USAGE)
    sentence(err(), f"error: {message[:1].lower()}{message[1:]}", style="bold red")
    if context is not None:
        sentence(err(), f"  see: {context.command_path} --help")
    return int(ExitCode.USAGE)
