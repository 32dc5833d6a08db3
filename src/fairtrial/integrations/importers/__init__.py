"""Import runs, datasets and graders of other tools.

To add a format, write a class with the two methods of `Importer` and name it in `IMPORTERS`. It returns the records of
`importing.records`; storing runs and writing files is the same for all formats.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import cast

from fairtrial.errors import ConfigurationError
from fairtrial.integrations.importers.records import Importer

# Format -> module and class; loaded when the format is used.
IMPORTERS: Mapping[str, tuple[str, str]] = {
    "inspect": ("fairtrial.integrations.importers.inspect_log", "InspectLogs"),
    "promptfoo": ("fairtrial.integrations.importers.promptfoo", "PromptfooResults"),
    "lm-eval": ("fairtrial.integrations.importers.lm_eval", "LmEvalSamples"),
    "pydantic-evals": ("fairtrial.integrations.importers.pydantic_evals", "PydanticEvals"),
    "openai-evals": ("fairtrial.integrations.importers.openai_evals", "OpenAIEvals"),
    "otlp": ("fairtrial.integrations.tracing.importing", "OtlpTraces"),
}


def load_importer(format: str) -> Importer:
    """Return the importer of a format."""
    if format not in IMPORTERS:
        near = get_close_matches(format, IMPORTERS, 1)
        remedy = f"did you mean {near[0]}?" if near else ""
        raise ConfigurationError(f"--format must be one of {', '.join(IMPORTERS)} (got {format!r}) {remedy}".rstrip())
    module, name = IMPORTERS[format]
    return cast(Importer, getattr(import_module(module), name)())


def detect_format(path: Path) -> str | None:
    """Return the format of a folder or file; None if no importer recognizes it."""
    return next((name for name in IMPORTERS if load_importer(name).recognizes(path)), None)
