"""What optimizers work with: every evaluation and every question is a stored run, done once under its key.

A search that was killed is started again from its beginning: the optimizer, which decides by its seed and by replies
alone, asks for the same evaluations, and those that are stored cost nothing.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fairtrial.base.codec import digest
from fairtrial.base.formatting import count, money, rate
from fairtrial.data.dataset import Dataset
from fairtrial.data.sample import Sample
from fairtrial.data.session import ChatMessage
from fairtrial.errors import ConfigurationError, ModelError
from fairtrial.reports.figures.analysis_plan import AnalysisPlan
from fairtrial.reports.plan.plan import plan
from fairtrial.reports.report import EvalReport
from fairtrial.reports.search import search as stored
from fairtrial.runs.identity import identify
from fairtrial.store.notes import SearchNote, write_notes
from fairtrial.suites.suite import EvalSuite
from fairtrial.trials.config import EvalConfig, Experiment

if TYPE_CHECKING:
    from fairtrial.data.splits import Splits
    from fairtrial.models.adapter import ProviderAdapter
    from fairtrial.store.protocol import RunRecord, RunStore
    from fairtrial.trials.context import TrialContext
    from fairtrial.trials.result import EvalResult

type Optimizer = Callable[[Searching], None]
"""Searches until it has no more ideas: it calls `evaluate` and `ask`, which end the search with its budget."""

_RETRIES = 2
_MARGIN = 1.2
"""How much more than expected is kept for the test."""
_MOST_ERRORS = 0.1
"""A candidate without a score on a larger share of the validation split is not chosen."""


class SearchEnded(BaseException):
    """The search ends; the message says why."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A candidate on one sample.

    Attributes:
        sample: The sample.
        score: The mean score over repeats; None if every trial ended in an error.
        results: The trials.
    """

    sample: Sample[Any, Any]
    score: float | None
    results: tuple[EvalResult, ...]


def text_parameter(suite: EvalSuite, experiment: Experiment, parameter: str) -> str:
    """Return the text to improve; raises ConfigurationError if the experiment has none of this name."""
    text = experiment.params.get(parameter)
    if not isinstance(text, str):
        texts = ", ".join(name for name, value in experiment.params.items() if isinstance(value, str))
        raise ConfigurationError(
            f"experiment {experiment.name!r} of suite {suite.name!r} has no text parameter {parameter!r}\n"
            + (f"name one of {texts}" if texts else "give it the text as a parameter, which the task reads")
        )
    return text


def check_splits(suite: EvalSuite, splits: Splits[Any, Any]) -> None:
    """Raise ConfigurationError if a split is empty."""
    for name in ("train", "validation", "test"):
        if not len(getattr(splits, name)):
            raise ConfigurationError(f"the {name} split of {suite.dataset.name!r} is empty: add samples")


class Searching:
    """A search in progress.

    Args:
        suite: The suite to improve.
        experiment: The experiment whose parameter is searched; its other parameters stay.
        parameter: The name of the parameter, whose value is text.
        splits: The parts of the dataset. Optimizers see `train` and `validation` only.
        store: Where every evaluation is stored.
        optimizer: The name of what proposes candidates.
        model: Answers `ask`.
        max_cost_usd: The budget of search, proposals and test together.
        max_trials: The most trials of candidates before the test.
        seed: The seed of the optimizer.
        plan: The analysis plan of the test; by default pass or fail, or the value of graded scores.
        announce: Receives a line for each evaluation.
    """

    def __init__(
        self,
        suite: EvalSuite,
        experiment: Experiment,
        parameter: str,
        *,
        splits: Splits[Any, Any],
        store: RunStore,
        optimizer: str,
        model: ProviderAdapter | None,
        max_cost_usd: float | None,
        max_trials: int | None = None,
        seed: int = 0,
        plan: AnalysisPlan | None = None,
        announce: Callable[[str], None] = lambda line: None,
    ) -> None:
        baseline = text_parameter(suite, experiment, parameter)
        check_splits(suite, splits)
        self.baseline, self.parameter, self.seed = baseline, parameter, seed
        self.train: Sequence[Sample[Any, Any]] = tuple(splits.train)
        self.validation: Sequence[Sample[Any, Any]] = tuple(splits.validation)
        self._searched = {sample.id for sample in (*self.train, *self.validation)}
        self._suite, self._experiment, self._splits, self._store = suite, experiment, splits, store
        self._model, self._max_cost, self._max_trials, self._plan = model, max_cost_usd, max_trials, plan
        self._announce = announce
        code = identify(suite.prepared(), samples=False).fingerprint
        parts = (splits.train, splits.validation, splits.test)
        made_of = [code, experiment.name, parameter, baseline, optimizer, seed, getattr(model, "model", "")]
        name = digest([*made_of, *(part.fingerprint for part in parts)])[:6]
        self.name = f"{suite.name}-{parameter}-{name}"
        self._tags = {stored.SEARCH: self.name, stored.PARAMETER: parameter, stored.OPTIMIZER: optimizer}
        self._runs = {run.noted.once: run for run in store.runs() if run.tags.get(stored.SEARCH) == self.name}
        self._stored = len(self._runs)
        self._spent = {run.run_id: stored.spent(store, [run]) for run in self._runs.values()}
        self._results: dict[str, dict[str, Evaluated]] = {}
        self._texts: dict[str, tuple[str, tuple[str, ...]]] = {}
        self._asked: Counter[str] = Counter()
        self._first: RunRecord | None = None
        self.work = 0
        """Grows with every evaluation and question that is new to this search: an optimizer without ideas can tell."""

    @property
    def spent_usd(self) -> float:
        """What search and test have cost so far."""
        return sum(cost for _, cost, _ in self._spent.values())

    def evaluate(self, text: str, samples: Sequence[Sample[Any, Any]], parents: Sequence[str] = ()) -> list[Evaluated]:
        """Evaluate a text on samples of the train or the validation split; each pair is evaluated once.

        Args:
            text: The candidate.
            samples: Some of `train` or `validation`.
            parents: The texts that it was made from.

        Raises:
            ConfigurationError: a sample is in neither of the two, or `parents` is one text.
            SearchEnded: the budget is used up.
        """
        if isinstance(parents, str):
            raise ConfigurationError(f"parents must be a list of texts (got the text {parents!r:.80})")
        foreign = next((sample.id for sample in samples if sample.id not in self._searched), None)
        if foreign is not None:
            raise ConfigurationError(
                f"sample {foreign!r} is in neither the train nor the validation split\n"
                "evaluate samples of search.train and search.validation"
            )
        candidate = candidate_id(text)
        self._texts.setdefault(candidate, (text, tuple(map(candidate_id, parents))))
        known = self._results.setdefault(candidate, {})
        wanted = {sample.id for sample in samples} - known.keys()
        for dataset in (self._splits.train, self._splits.validation):
            places = [place for place, sample in enumerate(dataset) if sample.id in wanted]
            if places:
                known |= self._evaluate(candidate, dataset.take(places))
        return [known[sample.id] for sample in samples]

    def ask(self, prompt: str) -> str:
        """Ask the model that proposes candidates; the same question again gets another answer."""
        if self._model is None:
            raise ConfigurationError("no model proposes candidates\ngive the suite an adapter, or name --model")
        model = self._model
        self._asked[prompt] += 1

        async def reflect(input: str, ctx: TrialContext) -> str:
            reply = await model.complete([ChatMessage("user", input)], session=ctx.session)
            return reply.text

        id = digest([prompt, self._asked[prompt]])[:16]
        dataset: Dataset[str, None] = Dataset([Sample(id, prompt)], name="proposals")
        config = EvalConfig(max_retries=_RETRIES, timeout_seconds=self._suite.config.timeout_seconds)
        suite = EvalSuite(self._suite.name + stored.SEARCHING, dataset, reflect, _answered, config=config)
        result = next(iter(self._run(suite, id, {}).results))
        if result.score is None:
            raise ModelError(f"the model proposed nothing: {result.error}")
        return str(result.output)

    def run(self, optimizer: Optimizer) -> None:
        """Search, store how that ended, and compare winner and baseline on the test split: one run, one look."""
        try:
            self.evaluate(self.baseline, self.validation)
            self._announce_gain()
            optimizer(self)
            why = f"{self._tags[stored.OPTIMIZER]} has no further candidates"
        except SearchEnded as ended:
            why = str(ended)
        if self._first is None:
            raise ConfigurationError(f"the baseline could not be evaluated: {why}\nraise the budget")
        best, known = self._best(), self._first.noted.search
        if known is None or known.best != best or len(self._runs) > self._stored:  # Else it ended as it had before.
            self._store.update_run(self._first.run_id, notes=write_notes(search=SearchNote(best, why)))
        if best == candidate_id(self.baseline):
            return
        plan = self._test_plan(self._first)
        texts = {stored.BASELINE: self.baseline, stored.WINNER: self._texts[best][0]}
        suite = self._variant(stored.TESTING, self._splits.test, texts)
        try:
            self._run(suite, f"test {best}", {stored.CANDIDATE: best}, plan=plan)
        except SearchEnded as ended:
            self._announce(f"the test is not finished: {ended}")

    def _test_plan(self, first: RunRecord) -> AnalysisPlan:
        plan = self._plan or AnalysisPlan(primary=stored.tested_metric(self._store, first))
        return replace(plan, looks=True)

    def _announce_gain(self) -> None:
        """Say which gain the test split can show, before anything is searched; nothing if it was looked at already."""
        if self._first is None or any(run.suite.endswith(stored.TESTING) for run in self._runs.values()):
            return
        used = self._test_plan(self._first)
        baseline = EvalReport(self._store, self._first)[stored.BASELINE]
        found = plan(
            baseline, metric=used.primary, power=used.power, alpha=used.alpha, tests=1, cluster=used.cluster,
            repeats=self._suite.config.repeats,
        ).test_split  # fmt: skip
        if found is not None:
            self._announce(found.sentence)

    def _evaluate(self, candidate: str, dataset: Dataset[Any, Any]) -> dict[str, Evaluated]:
        text, parents = self._texts[candidate]
        is_baseline = text == self.baseline
        suite = self._variant(stored.SEARCHING, dataset, {stored.BASELINE if is_baseline else candidate: text})
        tags = {stored.CANDIDATE: candidate, stored.PARENTS: " ".join(parents)}
        report = self._run(suite, digest([candidate, sorted(sample.id for sample in dataset)]), tags)
        by_sample: dict[str, list[EvalResult]] = {sample.id: [] for sample in dataset}
        for result in report.results:
            by_sample[result.sample_id].append(result)
        found = {sample.id: _evaluated(sample, by_sample[sample.id]) for sample in dataset}
        scores = [one.score for one in found.values() if one.score is not None]
        if self._first is None:
            if not scores:
                error = next((one.error for results in by_sample.values() for one in results if one.error), "")
                raise ConfigurationError(f"no sample of the validation split was scored for the baseline: {error}")
            self._first = report.run
        mean = rate(sum(scores) / len(scores)) if scores else "no score"
        left_out = f", {count(len(found) - len(scores), 'error')} left out" if len(scores) < len(found) else ""
        name = stored.BASELINE if is_baseline else f"candidate {list(self._results).index(candidate)}"
        split = report.run.noted.split
        on = "" if split is None else f" on {split.name}"
        self._announce(f"{name}{on}: {mean} of {count(len(found), 'sample')}{left_out}; {money(self.spent_usd)} so far")
        return found

    def _variant(self, suffix: str, dataset: Dataset[Any, Any], texts: Mapping[str, str]) -> EvalSuite:
        """Return the suite on a part of its samples, with an experiment for each text."""
        made, params = copy.copy(self._suite), self._experiment.params
        made.name += suffix
        made.dataset = dataset
        made.experiments = tuple(
            replace(self._experiment, name=name, params={**params, self.parameter: text})
            for name, text in texts.items()
        )
        retries = max(made.config.max_retries, _RETRIES)
        # A text that breaks the task must not end the search, and every sample counts.
        made.config = replace(
            made.config, max_retries=retries, max_same_errors=0, max_samples=None, stop_when=None, history=0
        )
        return made

    def _run(
        self, suite: EvalSuite, key: str, tags: Mapping[str, str], *, plan: AnalysisPlan | None = None
    ) -> EvalReport:
        """Execute a run once; a run that ended is read, and executed again only where nothing at all was scored."""
        self.work += 1  # Also for what is stored: a search that continues takes the same decisions.
        once = f"{self.name} {key}"
        note = digest(once)[:32]
        known = self._runs.get(note)
        if known is not None and known.status == "finished" and self._has_score(known):
            return EvalReport(self._store, known)
        own = 0.0 if known is None else self._spent[known.run_id][1]
        searches = plan is None
        if searches and known is None and self._max_trials is not None and stored.CANDIDATE in tags:
            used = sum(run.planned for run in self._evaluations())
            if used + len(suite.dataset) * suite.config.repeats > self._max_trials:
                raise SearchEnded(f"{used:,} of {count(self._max_trials, 'trial')} were used")
        if self._max_cost is not None:
            each = self._cost_of_trial()
            kept = _MARGIN * each * 2 * len(self._splits.test) * suite.config.repeats if searches else 0.0
            left = self._max_cost - self.spent_usd + own - kept
            if left <= max(own, each * len(suite.dataset) * len(suite.experiments) * suite.config.repeats):
                raise SearchEnded(self._used(kept))
            suite.config = replace(suite.config, max_cost_usd=left)
        how: dict[str, Any] = {"once": once}
        if known is not None and known.status == "finished":
            how = {"resume": f"errors:{known.run_id}"}
        run = suite.run_sync(store=self._store, tags={**self._tags, **tags}, plan=plan, **how).run
        self._runs[note] = run
        self._spent[run.run_id] = stored.spent(self._store, [run])
        unpriced = sum(calls for _, _, calls in self._spent.values())
        if self._max_trials is None and searches and (unpriced or not self.spent_usd):
            what = count(unpriced, "call has", "calls have") + " no known price" if unpriced else "trials cost nothing"
            raise ConfigurationError(f"{what}, so --max-cost does not end the search\nadd --max-trials N, or prices")
        if run.status not in ("finished", "unscored"):
            capped = run.noted.cost_cap_usd is not None
            raise SearchEnded(self._used() if capped else run.noted.stopped or f"run {run.name} is {run.status}")
        return EvalReport(self._store, run)

    def _has_score(self, run: RunRecord) -> bool:
        return any(one.outcomes.get("scored") for one in self._store.totals(run.run_id))

    def _evaluations(self) -> list[RunRecord]:
        """Return the runs of candidates on train and validation."""
        return [
            run for run in self._runs.values() if stored.CANDIDATE in run.tags and run.suite.endswith(stored.SEARCHING)
        ]

    def _cost_of_trial(self) -> float:
        """Return what a trial of a candidate has cost on average."""
        spent = [self._spent[run.run_id] for run in self._evaluations()]
        trials = sum(trials for trials, _, _ in spent)
        return sum(cost for _, cost, _ in spent) / trials if trials else 0.0

    def _used(self, kept: float = 0.0) -> str:
        used = f"{money(self.spent_usd)} of {money(self._max_cost)} were used"
        return f"{used}, and {money(kept)} are kept for the test" if kept else used

    def _best(self) -> str:
        """Return the candidate with the highest mean on the validation split; the baseline unless one is better."""
        best = candidate_id(self.baseline)
        highest = _mean(self._results[best], self.validation)
        for candidate, known in self._results.items():
            scored = [one for sample in self.validation if (one := known.get(sample.id)) and one.score is not None]
            if len(scored) < (1 - _MOST_ERRORS) * len(self.validation):
                continue
            mean = _mean(known, self.validation)
            if mean > highest:
                best, highest = candidate, mean
        return best


def candidate_id(text: str) -> str:
    """Return the id of a candidate: the start of the hash of its text."""
    return digest(text)[:8]


def _evaluated(sample: Sample[Any, Any], results: Sequence[EvalResult]) -> Evaluated:
    scores = [result.score.value for result in results if result.score is not None]
    return Evaluated(sample, sum(scores) / len(scores) if scores else None, tuple(results))


def _mean(known: Mapping[str, Evaluated], samples: Sequence[Sample[Any, Any]]) -> float:
    scores = [one.score for sample in samples if (one := known.get(sample.id)) and one.score is not None]
    return sum(scores) / len(scores)


def _answered(output: str, expected: None) -> float:
    """Score of a proposal: there is one."""
    return 1.0
