"""A suite from the command line: a prompt, a dataset, models and evaluators."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairtrial.cli.faults import Mistake
from fairtrial.cli.loading import load_object

if TYPE_CHECKING:
    from fairtrial.models.prompt import PromptTemplate
    from fairtrial.suites import EvalSuite

PROVIDERS = ("openai", "anthropic")


@dataclass(frozen=True, slots=True)
class Asked:
    """The options that make a suite."""

    prompt: str | None = None
    dataset: str | None = None
    models: tuple[str, ...] = ()
    evaluators: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.prompt or self.dataset or self.models or self.evaluators)

    @property
    def words(self) -> tuple[str, ...]:
        """The options as they are typed."""
        words = ["--prompt", self.prompt or "", "--dataset", self.dataset or ""]
        for model in self.models:
            words += ["--model", model]
        for evaluator in self.evaluators:
            words += ["--evaluator", evaluator]
        return tuple(words)


def suite_of(asked: Asked) -> EvalSuite:
    """The suite that was asked for; several models become experiments."""
    from fairtrial.data.dataset import Dataset
    from fairtrial.models.main_loop import prompt_task
    from fairtrial.suites import EvalSuite
    from fairtrial.trials.experiment import Experiment

    lacking = [
        option
        for option, value in (
            ("--prompt", asked.prompt),
            ("--dataset", asked.dataset),
            ("--model", asked.models),
            ("--evaluator", asked.evaluators),
        )
        if not value
    ]
    if lacking or asked.prompt is None or asked.dataset is None:
        raise Mistake(
            f"a prompt is run with --prompt, --dataset, --model and --evaluator together; {' and '.join(lacking)} "
            f"{'is' if len(lacking) == 1 else 'are'} missing",
            "as in: fairtrial run --prompt ask.md --dataset q.jsonl --model openai:gpt-5 --evaluator exact_match",
        )
    template = _template(asked.prompt)
    if not Path(asked.dataset).is_file():
        raise Mistake(f"there is no dataset file {asked.dataset}", "--dataset takes a .jsonl, .json, .csv or .parquet")
    dataset = Dataset.load(asked.dataset)
    scorer = _evaluator(asked.evaluators)
    adapters = {_named(model): _adapter(model) for model in asked.models}
    if len(adapters) < len(asked.models):
        raise Mistake("the same --model was given twice", "to try samples several times, use --repeats")
    experiments = [Experiment(name, task=prompt_task(template, adapter)) for name, adapter in adapters.items()]
    return EvalSuite(_named(template.name), dataset, evaluator=scorer, experiments=experiments)


def _named(text: str) -> str:
    """A name for a suite or an experiment; the marks that have a meaning in names of runs are taken out."""
    return re.sub(r"[:@/\s]+", "-", text).strip("-") or "prompt"


def _template(where: str) -> PromptTemplate[Any]:
    from fairtrial.models.prompt import MarkdownSection, PromptTemplate

    path = Path(where)
    if path.suffix in (".md", ".txt"):
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise Mistake(f"the prompt {where} cannot be read: {error.strerror}", "name a text file") from None
        return PromptTemplate(name=path.stem, sections=[MarkdownSection("", text, "text")])
    template = load_object(where, "a prompt")
    if not isinstance(template, PromptTemplate):
        raise Mistake(f"{where} is not a PromptTemplate but {type(template).__name__}")
    return template


def _adapter(model: str) -> Any:
    provider, _, name = model.partition(":")
    if provider in PROVIDERS:
        if not name:
            raise Mistake(f"--model {model} does not say which", f"as in: --model {provider}:NAME")
        from fairtrial.models import AnthropicAdapter, OpenAIAdapter

        return OpenAIAdapter(name) if provider == "openai" else AnthropicAdapter(name)
    if provider.endswith(".py"):
        return load_object(model, "a model")
    near = difflib.get_close_matches(provider, PROVIDERS, 1)
    meant = (
        f"did you mean --model {near[0]}:{name or 'NAME'}?"
        if near
        else "use openai:NAME, anthropic:NAME or file.py:adapter"
    )
    raise Mistake(f"there is no provider {provider!r}", meant)


def _evaluator(names: Sequence[str]) -> Any:
    from fairtrial.scoring import all_of

    found = [load_object(name, "an evaluator") if ":" in name else _built_in(name) for name in names]
    return found[0] if len(found) == 1 else all_of(*found)


def _built_in(name: str) -> Any:
    known = built_in_evaluators()
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, 1)
    meant = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}; your own is file.py:name"
    raise Mistake(f"there is no evaluator {name!r} that works without parameters", meant)


def built_in_evaluators() -> dict[str, Any]:
    """The built-in evaluators that need no parameters: they take an output and what was expected."""
    from fairtrial import scoring

    found = {}
    for name in scoring.__all__:
        value = getattr(scoring, name)
        if name.islower() and callable(value):
            first = next(iter(inspect.signature(value).parameters), "")
            if first == "output":
                found[name] = value
    return found
