"""Apply command-line options to a suite."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fairtrial.cli.names import find_sample
from fairtrial.cli.pairs import parse_pairs
from fairtrial.cli.user_errors import UserError
from fairtrial.reports.render.safe_text import plain
from fairtrial.reports.rerun import PART

if TYPE_CHECKING:
    from fairtrial.data.dataset import Dataset
    from fairtrial.suites import EvalSuite
    from fairtrial.trials.experiment import Experiment


@dataclass(frozen=True, slots=True)
class Selection:
    """The part of a suite to run, and settings to override."""

    max_samples: int | None = None
    samples: Sequence[str] = ()
    filters: Sequence[str] = ()
    repeats: int | None = None
    concurrency: int | None = None
    experiments: Sequence[str] = ()
    params: Sequence[str] = ()
    seed: int | None = None
    max_cost: float | None = None
    strict_cost: bool = False
    max_same_errors: int | None = None
    strict_packages: bool = False

    @property
    def is_part(self) -> bool:
        """True if only some samples are selected."""
        return self.max_samples is not None or bool(self.samples) or bool(self.filters)

    def check_for_fleet(self) -> None:
        """Reject options that change the suite: workers run it as its file defines it."""
        used = {
            "--max-samples": self.max_samples is not None,
            "--sample": bool(self.samples),
            "--filter": bool(self.filters),
            "--experiment": bool(self.experiments),
            "--set": bool(self.params),
            "--seed": self.seed is not None,
            "--strict-packages": self.strict_packages,
        }
        wrong = [option for option, is_given in used.items() if is_given]
        if wrong:
            raise UserError(
                f"{' and '.join(wrong)} cannot be used with a fleet: workers run the suite as its file defines it",
                "omit --mailbox to run locally",
            )


def selected(suite: EvalSuite, selection: Selection) -> EvalSuite:
    """Return a copy of the suite with the options applied; a part of the samples gets a separate suite name.

    So a quick look at five samples never takes the place of `suite@latest`, nor does it get in the way of a run that
    waits to be resumed.
    """
    chosen = copy.copy(suite)
    changes: dict[str, Any] = {
        "repeats": selection.repeats,
        "max_concurrent": selection.concurrency,
        "seed": selection.seed,
        "max_cost_usd": selection.max_cost,
        "strict_cost": selection.strict_cost or None,
        "max_same_errors": selection.max_same_errors,
        "strict_packages": selection.strict_packages or None,
    }
    chosen.config = replace(suite.config, **{name: value for name, value in changes.items() if value is not None})
    if selection.is_part:
        chosen.dataset = _part(suite, selection)
        chosen.config = replace(chosen.config, max_samples=None)
        chosen.name = suite.name + PART
    if selection.experiments:
        chosen.experiments = _experiments(suite, selection.experiments)
    if selection.params:
        chosen.experiments = _with_params(chosen, dict(parse_pairs("--set", selection.params)))
    return chosen


def _part(suite: EvalSuite, selection: Selection) -> Dataset[Any, Any]:
    dataset = suite.dataset if suite.config.max_samples is None else suite.dataset.head(suite.config.max_samples)
    if selection.samples:
        ids = [sample.id for sample in dataset]
        wanted = {text: find_sample(text, ids) for text in selection.samples}
        missing = [text for text, sample_id in wanted.items() if sample_id is None]
        if missing:
            raise _no_sample(suite, dataset, sorted(missing)[0])
        chosen = set(wanted.values())
        dataset = dataset.filter(lambda sample: sample.id in chosen)
    if selection.filters:
        facts = list(parse_pairs("--filter", selection.filters))
        texts = list(parse_pairs("--filter", selection.filters, as_text=True))
        # `--filter level=3` matches both the number 3 and the text "3".
        pairs = [(key, (value, text)) for (key, value), (_, text) in zip(facts, texts, strict=True)]
        everything, dataset = (
            dataset,
            dataset.filter(
                lambda sample: all(key in sample.metadata and sample.metadata[key] in values for key, values in pairs)
            ),
        )
        if not len(dataset):
            raise _nothing_left(suite, everything, selection.filters, [key for key, _ in pairs])
    return dataset if selection.max_samples is None else dataset.head(selection.max_samples)


def _no_sample(suite: EvalSuite, dataset: Dataset[Any, Any], wanted: str) -> UserError:
    ids = [sample.id for sample in dataset]
    near = difflib.get_close_matches(wanted, ids, 3, 0.5)
    hint = (
        f"did you mean {' or '.join(map(plain, near))}?" if near else f"ids look like: {', '.join(map(plain, ids[:3]))}"
    )
    return UserError(
        f"dataset {plain(suite.dataset.name)!r} of suite {suite.name!r} has no sample {plain(wanted)!r}", hint
    )


def _nothing_left(
    suite: EvalSuite, dataset: Dataset[Any, Any], filters: Sequence[str], keys: Sequence[str]
) -> UserError:
    metadata_keys = sorted({key for sample in dataset for key in sample.metadata})
    strange = [key for key in keys if key not in metadata_keys]
    what = f"no sample of suite {suite.name!r} has {' and '.join(map(plain, filters))}"
    if strange:
        near = difflib.get_close_matches(strange[0], metadata_keys, 1)
        hint = f"did you mean {near[0]}?" if near else f"the metadata has {', '.join(metadata_keys) or 'no keys'}"
        return UserError(what, hint)
    values = sorted({str(sample.metadata[keys[0]]) for sample in dataset if keys[0] in sample.metadata})
    return UserError(what, f"{plain(keys[0])} is one of {', '.join(map(plain, values[:8]))}")


def _experiments(suite: EvalSuite, names: Sequence[str]) -> tuple[Experiment, ...]:
    from fairtrial.trials.experiment import Experiment

    offered = suite.experiments or (Experiment(suite.config.experiment_name or "baseline"),)
    by_name = {experiment.name: experiment for experiment in offered}
    for name in names:
        if name not in by_name:
            near = difflib.get_close_matches(name, by_name, 1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(by_name)}"
            raise UserError(f"suite {suite.name!r} has no experiment {name!r}", hint)
    return tuple(by_name[name] for name in dict.fromkeys(names))


def _with_params(suite: EvalSuite, params: dict[str, Any]) -> tuple[Experiment, ...]:
    from fairtrial.trials.experiment import Experiment

    offered = suite.experiments or (Experiment(suite.config.experiment_name or "baseline"),)
    return tuple(replace(experiment, params={**experiment.params, **params}) for experiment in offered)
