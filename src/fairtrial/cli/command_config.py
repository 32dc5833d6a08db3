"""`fairtrial config`: the settings in effect, and where each comes from."""

from __future__ import annotations

from collections.abc import Mapping

import typer

from fairtrial.cli import options


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("config")(config)


def config(json: options.Json = False) -> int:
    """Print the settings in effect and where each comes from.

    Settings come from [tool.fairtrial] in pyproject.toml or from environment variables such as FAIRTRIAL_STORE.
    Options on the command line override the environment, and the environment overrides the file.

    \b
    Examples:
      fairtrial config
      FAIRTRIAL_STORE=postgresql://db/evals fairtrial config --json
    """
    from fairtrial.base.codec import to_json
    from fairtrial.cli.screen import add_row, make_table, out, print_json, print_table
    from fairtrial.cli.settings import load_settings
    from fairtrial.store.redact import current

    settings = load_settings()
    redact = current().text
    if json:
        facts = [
            {
                "name": setting.name,
                "value": redact(setting.value) if isinstance(setting.value, str) else to_json(setting.value),
                "origin": setting.origin,
                "about": setting.about,
            }
            for setting in settings.found.values()
        ]
        print_json({"format": "fairtrial.config/1", "settings": facts})
        return 0
    console = out()
    wide = console.width >= 120
    columns = ("setting", "value", "origin", "what it is") if wide else ("setting", "value", "origin")
    table = make_table(*columns, prose=("value", "what it is"))
    for setting in settings.found.values():
        value = setting.value
        listed = isinstance(value, tuple | Mapping)  # For prices: the names of the models.
        shown = "-" if value is None or (listed and not value) else ", ".join(value) if listed else str(value)
        cells = (setting.name, redact(shown), setting.origin, setting.about)
        add_row(table, *cells[: len(columns)])
    print_table(console, table)
    return 0
