"""Objects by their path, and suites made of options."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairtrial.base.plugins import find_plugin, plugin_names
from fairtrial.cli.user_errors import UserError, explain, location_of
from fairtrial.errors import ConfigurationError, DatasetError, FairtrialError

if TYPE_CHECKING:
    from fairtrial.models.prompt import PromptTemplate
    from fairtrial.suites import EvalSuite


def load(where: str) -> EvalSuite:
    """Load the suite named `file.py`, `file.py:name`, `module` or `module:name`."""
    from fairtrial.suites.loading import load_suite

    try:
        return load_suite(where)
    except ConfigurationError as error:
        raise _explain(error, where) from error.__cause__


def load_object(where: str, what: str) -> Any:
    """Load the object named `file.py:name`."""
    from fairtrial.suites.loading import load_module

    path, _, name = where.partition(":")
    if not name:
        raise UserError(f"{what} must be FILE:NAME (got {where!r})", f"as in: {path}:{what.split()[-1]}")
    try:
        module = load_module(path)
    except ConfigurationError as error:
        raise _explain(error, where) from error.__cause__
    value: Any = module
    for step in name.split("."):
        if not hasattr(value, step):
            near = difflib.get_close_matches(
                step, [attribute for attribute in dir(value) if not attribute.startswith("_")], 1
            )
            raise UserError(f"there is no {name!r} in {path}", f"did you mean {path}:{near[0]}?" if near else "")
        value = getattr(value, step)
    return value


def _explain(error: ConfigurationError, where: str) -> FairtrialError:
    """Convert an import error into one that names the user's line instead of ours."""
    cause = error.__cause__
    if cause is None:
        return error
    location = location_of(cause) or where
    if isinstance(cause, FairtrialError):
        explained = explain(cause)
        remedy = explained.remedy
        what = explained.what if explained.where is None else f"{location}: {explained.what}"
    else:
        message = cause.msg if isinstance(cause, SyntaxError) else str(cause)  # The place has been named.
        what = f"{location}: {type(cause).__name__}: {' '.join(message.split())}"
        remedy = _remedy(cause, location)
    return UserError(what, remedy)


def _remedy(cause: BaseException, location: str) -> str:
    if isinstance(cause, ModuleNotFoundError):
        suite = Path(location.rpartition(":")[0])
        if cause.name and suite.with_name(f"{cause.name.partition('.')[0]}.py").is_file():
            return f"name the suite by its path, so that files beside it are found: {suite}"
        return (
            f"install the package that provides {cause.name}, or correct the name; files beside the suite and in this "
            "folder can be imported"
        )
    if isinstance(cause, ImportError):
        return "correct the name that is imported; --debug shows the full traceback"
    if isinstance(cause, SyntaxError):
        return "correct this line; nothing was run"
    return "the suite's file itself fails; --debug shows the full traceback"


@dataclass(frozen=True, slots=True)
class AdHocOptions:
    """Options that define a suite on the command line."""

    prompt: str
    dataset: str
    models: tuple[str, ...]
    evaluators: tuple[str, ...]
    columns: tuple[str, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        """Return the command that has these options."""
        named = {"--model": self.models, "--evaluator": self.evaluators, "--column": self.columns}
        pairs = (word for option, values in named.items() for value in values for word in (option, value))
        return ("try", self.prompt, "--dataset", self.dataset, *pairs)


def suite_of(adhoc_options: AdHocOptions) -> EvalSuite:
    """Build the suite from the options; several models become experiments."""
    from fairtrial.data.dataset import Dataset
    from fairtrial.data.rows import COLUMNS_EXAMPLE
    from fairtrial.models.main_loop import prompt_task
    from fairtrial.suites import EvalSuite
    from fairtrial.trials.config import Experiment

    template = _template(adhoc_options.prompt)
    if not Path(adhoc_options.dataset).is_file():
        raise UserError(
            f"there is no dataset file {adhoc_options.dataset}", "--dataset takes a .jsonl, .json, .csv or .parquet"
        )
    try:
        dataset = Dataset.load(adhoc_options.dataset, columns=_columns(adhoc_options.columns))
    except (ConfigurationError, DatasetError) as error:
        if COLUMNS_EXAMPLE not in str(error):
            raise
        what, _, remedy = str(error).partition("\n")
        example = "--column input=question --column expected=answer"
        raise UserError(what, remedy.replace(COLUMNS_EXAMPLE, example)) from None
    scorer = _evaluator(adhoc_options.evaluators)
    adapters = {_named(model): adapter_of(model) for model in adhoc_options.models}
    if len(adapters) < len(adhoc_options.models):
        raise UserError("the same --model was given twice", "to run samples several times, use --repeats")
    experiments = [Experiment(name, task=prompt_task(template, adapter)) for name, adapter in adapters.items()]
    return EvalSuite(_named(template.name), dataset, evaluator=scorer, experiments=experiments)


def _columns(options: Sequence[str]) -> dict[str, str | list[str]] | None:
    """Parse FIELD=COLUMN options; several columns, separated by commas, become a list."""
    pairs = [text.partition("=") for text in options]
    for text, (field, _, column) in zip(options, pairs, strict=True):
        if not field or not column:
            raise UserError(f"--column must be FIELD=COLUMN (got {text!r})", "as in: --column input=question")
    return {field: column.split(",") if "," in column else column for field, _, column in pairs} or None


def _named(text: str) -> str:
    """Return a valid name for a suite or an experiment: ':', '@', '/' and spaces become '-'."""
    return re.sub(r"[:@/\s]+", "-", text).strip("-") or "prompt"


def _template(where: str) -> PromptTemplate[Any]:
    from fairtrial.models.prompt import MarkdownSection, PromptTemplate

    path = Path(where)
    if path.suffix in (".md", ".txt"):
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(f"the prompt {where} cannot be read: {error.strerror}", "name a text file") from None
        except UnicodeDecodeError:
            raise UserError(f"the prompt {where} must be UTF-8", "save it as UTF-8") from None
        return PromptTemplate(name=path.stem, sections=[MarkdownSection("", text, "text")])
    template = load_object(where, "a prompt")
    if not isinstance(template, PromptTemplate):
        raise UserError(f"{where} must be a PromptTemplate (got {type(template).__name__})")
    return template


def adapter_of(model: str) -> Any:
    """Return the adapter of a model named PROVIDER:NAME or file.py:adapter."""
    provider, _, name = model.partition(":")
    if provider.endswith(".py"):
        found = load_object(model, "a model")
        if isinstance(found, type) or not all(callable(getattr(found, one, None)) for one in ("complete", "evaluate")):
            kind = "a class" if isinstance(found, type) else type(found).__name__
            example = f'as in: {name} = fairtrial.OpenAIAdapter("gpt-6.1-sol")'
            raise UserError(f"{model} must be an adapter (got {kind})", example)
        return found
    from fairtrial.models.providers import PROVIDERS, model_from_name

    if provider in PROVIDERS or provider in plugin_names("providers"):
        if not name:
            raise UserError(f"--model must be PROVIDER:NAME (got {model!r})", f"as in: --model {provider}:NAME")
        return model_from_name(model)
    known = [*PROVIDERS, *plugin_names("providers")]
    near = difflib.get_close_matches(provider, known, 1, 0.7)
    meant = (
        f"did you mean --model {near[0]}:{name or 'NAME'}?"
        if near
        else f"use PROVIDER:NAME ({', '.join(known)}) or file.py:adapter"
    )
    raise UserError(f"there is no provider {provider!r}", meant)


def _evaluator(names: Sequence[str]) -> Any:
    from fairtrial.scoring import all_of

    evaluators = [load_object(name, "an evaluator") if ":" in name else _built_in(name) for name in names]
    return evaluators[0] if len(evaluators) == 1 else all_of(*evaluators)


def _built_in(name: str) -> Any:
    evaluators = built_in_evaluators()
    found = evaluators.get(name) or find_plugin("evaluators", name)
    if found is not None:
        return found
    evaluators |= dict.fromkeys(plugin_names("evaluators"))
    near = difflib.get_close_matches(name, evaluators, 1)
    meant = f"did you mean {near[0]}?" if near else f"use one of {', '.join(evaluators)}, or your own: file.py:name"
    raise UserError(f"there is no evaluator {name!r} that works without parameters", meant)


def built_in_evaluators() -> dict[str, Any]:
    """Return the built-in evaluators that need no parameters: their first argument is the output."""
    from fairtrial import scoring

    evaluators = {}
    for name in scoring.__all__:
        value = getattr(scoring, name)
        if name.islower() and callable(value):
            first = next(iter(inspect.signature(value).parameters), "")
            if first == "output":
                evaluators[name] = value
    return evaluators
