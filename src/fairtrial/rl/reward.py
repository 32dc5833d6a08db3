"""Evaluators as rewards."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import anyio

from fairtrial.base.codec import decode, from_json, parse_json, to_json
from fairtrial.base.sync_bridge import call_sync
from fairtrial.data.dataset import Dataset
from fairtrial.data.sample import NOT_GIVEN, Sample
from fairtrial.data.session.events import ToolInvoked
from fairtrial.data.session.session import Session
from fairtrial.data.session.trajectory import ChatMessage, ToolCall, Trajectory
from fairtrial.errors import CodecError, ConfigurationError, DatasetError
from fairtrial.rl.fork import World, worlds_of
from fairtrial.rl.local_model import messages_of
from fairtrial.scoring.evaluator import Case, Evaluator, Scorer, resolve
from fairtrial.scoring.score import Score
from fairtrial.suites.loading import load_module
from fairtrial.suites.suite import EvalSuite


def import_path(value: object, what: str) -> str:
    """Return `module:name` (or `/path/script.py:name`) of an object that is a global variable of a module.

    Raises:
        ConfigurationError: no module that other processes can import has it as a variable.
    """
    for module, name in _homes(value):
        if module.__name__ != "__main__":
            return f"{module.__name__}:{name}"
        file = getattr(module, "__file__", None)
        if file and Path(file).is_file():
            spec = getattr(module, "__spec__", None)
            return f"{spec.name if spec is not None else Path(file).resolve()}:{name}"
    raise ConfigurationError(
        f"{what} must be a variable at the top level of a module, because processes of a trainer import it "
        "(it is none)\n"
        "assign it in a .py file, as in `suite = EvalSuite(...)`, and import it from there"
    )


def load_object(where: str) -> Any:
    """Return the object that an import string of `import_path` names."""
    location, _, name = where.rpartition(":")
    value: Any = load_module(location)
    for step in name.split("."):
        try:
            value = getattr(value, step)
        except AttributeError:
            raise ConfigurationError(f"there is no {name!r} in {location}: its code has changed since") from None
    return value


def _homes(value: object) -> Iterator[tuple[ModuleType, str]]:
    """Yield the modules that have the object as a variable, its own module first."""
    own = getattr(value, "__module__", None)
    home = getattr(value, "home", None)

    def distance(module: ModuleType) -> int:
        return (
            0 if getattr(module, "__name__", None) == own or (home and getattr(module, "__file__", None) == home) else 1
        )

    for module in sorted(sys.modules.values(), key=distance):
        for name, found in list(getattr(module, "__dict__", {}).items()):
            if found is value:
                yield module, name


type Row = Mapping[str, Any]
"""A row of a training file: `sample`, the sample as JSON text, or `sample_id`, which is looked up in the dataset."""

type _Member = tuple[Sample[Any, Any] | Row, Any, Any, World | None]

_log = logging.getLogger("fairtrial.rl")
_CONCURRENT = 32
_MOST_SAMPLES = 10_000
_TEXT = (str, object, Any)


def reward(
    suite: EvalSuite | Evaluator | Scorer, dataset: Dataset[Any, Any] | None = None, *, name: str = "reward"
) -> RewardFunction:
    """Return the evaluator of a suite as a reward function for trainers.

    The result is an ordinary synchronous callable. It is pickled as its import string, so the suite, or the evaluator
    and the dataset, must be variables of a module.

    Args:
        suite: The suite; or an evaluator.
        dataset: With an evaluator, the samples, for rows that have only a `sample_id`.
        name: The name of the function, under which trainers log it.

    Raises:
        ConfigurationError: the suite, evaluator or dataset is not a variable of a module that can be imported.
    """
    if isinstance(suite, EvalSuite):
        if dataset is not None:
            raise ConfigurationError("a suite has a dataset of its own: reward(suite), or reward(evaluator, dataset)")
        where: tuple[str, str | None] = (import_path(suite, f"suite {suite.name!r}"), None)
    else:
        samples = None if dataset is None else import_path(dataset, f"dataset {dataset.name!r}")
        where = (import_path(suite, "the evaluator"), samples)
    return RewardFunction(suite, dataset, where, name)


class RewardFunction:
    """A reward function that scores with an evaluator; made by `reward`.

    Attributes:
        where: The import strings of the suite, or of the evaluator and the dataset.
        failures: The number of completions that could not be scored.
    """

    def __init__(
        self,
        suite: EvalSuite | Evaluator | Scorer,
        dataset: Dataset[Any, Any] | None,
        where: tuple[str, str | None],
        name: str,
    ) -> None:
        self.where = where
        self.__name__ = name
        self.failures = 0
        if isinstance(suite, EvalSuite):
            dataset = suite.dataset
            self._scorer = resolve(suite.evaluator)
            self._adapter: Any = suite.adapter
            self._output_type = suite.prepared().rules.tasks[0].output_type
        else:
            self._scorer, self._adapter, self._output_type = resolve(suite), None, str
        self._dataset = dataset
        self._by_id: dict[str, Sample[Any, Any]] | None = None
        self._parsed: dict[str, Sample[Any, Any]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self.where, self.__name__)

    def __repr__(self) -> str:
        return f"<RewardFunction {self.__name__} of {self.where[0]}>"

    def __call__(
        self,
        prompts: Sequence[Any] | None = None,
        completions: Sequence[Any] | None = None,
        *,
        log_metric: Callable[[str, float], object] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """Score a batch, as TRL calls it: lists of prompts and completions, and each column of the file as a list.

        Returns the rewards; None for a completion that could not be scored, which trainers leave out. The means of
        metrics without a weight go to `log_metric`.
        """
        if completions is None:
            raise ConfigurationError("completions must be given: a list of texts or of lists of messages")
        scores = self.score_columns(prompts, completions, columns)
        if log_metric is not None:
            known = [() if score is None else score.metrics for score in scores]
            log_means(log_metric, [{one.name: one.value for one in metrics if one.weight == 0} for metrics in known])
        return [None if score is None else score.reward for score in scores]

    def score_columns(
        self, prompts: Sequence[Any] | None, completions: Sequence[Any], columns: Mapping[str, Any]
    ) -> list[Score | None]:
        """Return the scores of a batch whose samples and environments are columns, as trainers pass them."""
        name = "sample" if "sample" in columns else "sample_id"
        if name not in columns:
            raise ConfigurationError(
                f"the batch must have a column sample or sample_id (got {', '.join(columns) or 'no columns'})\n"
                "write the training file with fairtrial.rl.write_prompts, which adds both"
            )
        given = [None] * len(completions) if prompts is None else prompts
        rows = [{name: value} for value in columns[name]]
        return self.score_batch(rows, completions, given, worlds=worlds_of(columns.get("environments")))

    def score(
        self,
        sample: Sample[Any, Any] | Row,
        completion: str | Sequence[Any],
        prompt: str | Sequence[Any] | None = None,
        *,
        world: World | None = None,
    ) -> Score:
        """Return the whole score of one completion; errors of the evaluator are raised.

        Args:
            sample: The sample, or a row of a training file.
            completion: The answer of the model: a text, or its messages with those of tools.
            prompt: The messages before it; by default the input of the sample.
            world: The environment in which it was given, which stays open.
        """
        case = self._case(sample, completion, prompt, world)
        return call_sync(partial(self._scorer.score, case)) if self._scorer.is_async else self._scorer.score_now(case)

    def score_batch(
        self,
        rows: Sequence[Sample[Any, Any] | Row],
        completions: Sequence[Any],
        prompts: Sequence[Any],
        *,
        worlds: Sequence[World | None] | None = None,
    ) -> list[Score | None]:
        """Return the scores of a batch; None where the evaluator failed, with a warning in the log.

        Args:
            rows: The samples, or rows of a training file.
            completions: The answers.
            prompts: The messages before them; None for the inputs of the samples.
            worlds: The environments of the rollouts, which are closed after scoring.
        """
        problems: list[BaseException] = []
        within: Sequence[World | None] = [None] * len(completions) if worlds is None else worlds
        batch = list(zip(rows, completions, prompts, within, strict=True))
        try:
            scores = self._score_all(batch, problems)
        finally:
            for world in within:
                if world is not None:
                    world.close()
        if problems:
            self.failures += len(problems)
            first = problems[0]
            _log.warning(
                "%d of %d completions have no reward, because the evaluator failed: %s: %s",
                len(problems), len(scores), type(first).__name__, first,
            )  # fmt: skip
        return scores

    def _score_all(self, batch: Sequence[_Member], problems: list[BaseException]) -> list[Score | None]:
        if self._scorer.is_async:
            return call_sync(partial(self._score_async, batch, problems))
        scores: list[Score | None] = []
        for member in batch:
            try:
                scores.append(self._scorer.score_now(self._case(*member)))
            except ConfigurationError:
                raise
            except Exception as error:
                problems.append(error)
                scores.append(None)
        return scores

    async def _score_async(self, batch: Sequence[_Member], problems: list[BaseException]) -> list[Score | None]:
        scores: list[Score | None] = [None] * len(batch)
        limit = anyio.Semaphore(_CONCURRENT)

        async def score_one(at: int, case: Case) -> None:
            async with limit:
                try:
                    scores[at] = await self._scorer.score(case)
                except Exception as error:
                    problems.append(error)

        cases: list[tuple[int, Case]] = []
        for at, member in enumerate(batch):
            try:
                cases.append((at, self._case(*member)))
            except (CodecError, RuntimeError) as error:
                problems.append(error)
        async with anyio.create_task_group() as group:
            for at, case in cases:
                group.start_soon(score_one, at, case)
        return scores

    def _case(self, row: Sample[Any, Any] | Row, completion: Any, prompt: Any, world: World | None = None) -> Case:
        sample = row if isinstance(row, Sample) else self.sample_of(row)
        if world is None and isinstance(completion, str) and not self._scorer.needs_session:
            return Case(sample, self._output(completion), adapter=self._adapter)
        if world is not None and world.problem is not None:
            raise RuntimeError(world.problem)
        replies = messages_of(completion, role="assistant")
        output = self._output(Trajectory(tuple(replies)).last_reply or "")
        session = None
        if self._scorer.needs_session:
            before = [] if prompt is None else messages_of(prompt, role="user")
            invoked = None if world is None else world.invoked
            session = conversation_session([*before, *replies], invoked) if before or len(replies) > 1 else None
        environment = None if world is None else world.environment
        return Case(sample, output, session, adapter=self._adapter, environment=environment)

    def _output(self, text: str) -> Any:
        return text if self._output_type in _TEXT else decode(self._output_type, text)

    def sample_of(self, row: Row) -> Sample[Any, Any]:
        """Return the sample of a row of a training file."""
        text = row.get("sample")
        if isinstance(text, str):
            found = self._parsed.get(text)
            if found is None:
                if len(self._parsed) >= _MOST_SAMPLES:
                    self._parsed.clear()
                found = self._parsed[text] = self._parse(text)
            return found
        wanted = row.get("sample_id")
        if self._dataset is None:
            raise ConfigurationError(
                f"sample {wanted!r} cannot be looked up without a dataset: pass reward(evaluator, dataset), or keep "
                "the column `sample` in the training file"
            )
        known = self._known(str(wanted))
        if known is None:
            raise ConfigurationError(
                f"dataset {self._dataset.name!r} has no sample {wanted!r}\n"
                "write the training file again with fairtrial.rl.write_prompts"
            )
        return known

    def _known(self, sample_id: str) -> Sample[Any, Any] | None:
        if self._by_id is None:
            self._by_id = {} if self._dataset is None else {sample.id: sample for sample in self._dataset}
        return self._by_id.get(sample_id)

    def _parse(self, text: str) -> Sample[Any, Any]:
        input_type = object if self._dataset is None else self._dataset.input_type
        expected_type = object if self._dataset is None else self._dataset.expected_type
        try:
            tree = parse_json(text)
            known = self._known(tree["id"])
            if known is not None and sample_text(known) == tree:
                return known  # With the types of its input and expected value.
            expected = tree.get("expected", NOT_GIVEN)
            is_known = expected is not NOT_GIVEN and expected is not None
            return Sample(
                tree["id"],
                from_json(input_type, tree.get("input")),
                from_json(expected_type, expected) if is_known else expected,
                from_json(dict[str, Any], tree.get("metadata") or {}),
            )
        except (CodecError, DatasetError, KeyError, AttributeError) as error:
            raise ConfigurationError(
                f"the column `sample` must have samples as JSON text (got {text!r:.80}: {error})"
            ) from None


def sample_text(sample: Sample[Any, Any]) -> dict[str, Any]:
    """Return a sample as JSON values, for the column `sample`."""
    tree = {"id": sample.id, "input": to_json(sample.input)}
    if sample.has_expected:
        tree["expected"] = to_json(sample.expected)
    return {**tree, "metadata": to_json(sample.metadata)} if sample.metadata else tree


def _restore(where: tuple[str, str | None], name: str) -> RewardFunction:
    dataset = None if where[1] is None else load_object(where[1])
    return RewardFunction(load_object(where[0]), dataset, where, name)


def conversation_session(messages: Sequence[ChatMessage], invoked: Sequence[ToolInvoked] | None = None) -> Session:
    """Return a session with the messages of a conversation and its tool calls.

    Args:
        messages: The messages.
        invoked: The tool calls in their order; by default they are derived from the messages.
    """
    session = Session()
    asked: dict[str, ToolCall] = {}
    waiting: list[ToolCall] = []
    made = iter(invoked or ())
    for message in messages:
        session.record(message)
        if message.tool_calls:
            waiting = list(message.tool_calls)
            asked.update((call.id, call) for call in waiting if call.id)
        elif message.role == "tool":
            call = asked.get(message.name) or (waiting[0] if waiting else None)
            waiting = waiting[1:]
            name = message.name if call is None else call.name
            derived = ToolInvoked(name, {} if call is None else call.arguments, message.text)
            if invoked is None:
                session.record(derived)
            elif (known := next(made, None)) is not None:
                session.record(known)
    for rest in made:
        session.record(rest)
    return session


def log_means(log_metric: Callable[[str, float], object], rows: Sequence[Mapping[str, float]]) -> None:
    """Log the mean of each metric over the rows that have it."""
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row[name] for row in rows if name in row]
        log_metric(name, sum(values) / len(values))
