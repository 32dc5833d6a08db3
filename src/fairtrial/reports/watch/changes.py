"""What runs record that changed in the days of an alarm: models, code, parameters, evaluator, packages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

from fairtrial.base.formatting import listed
from fairtrial.data.session.events import PromptExecuted
from fairtrial.reports.watch.watched import WatchedChange, WatchedFigure

if TYPE_CHECKING:
    from fairtrial.data.session.views import SessionView
    from fairtrial.reports.watch.days import ScoredDay
    from fairtrial.store.protocol import RunRecord, RunStore

_TRIALS = 20  # Of each run, whose transcripts are read for the names of models.
_LONGEST = 40
_NAMED = 3


def find_changes(
    store: RunStore, days: Sequence[ScoredDay], experiment: str, figure: WatchedFigure
) -> tuple[WatchedChange, ...]:
    """Return what changed on the days on which the change may have begun, against the run before."""
    names = [day.day for day in days]
    start, end = names.index(str(figure.earliest)), names.index(str(figure.latest))
    runs = [(day.day, run) for day in days[start - 1 : end + 1] for run in day.runs]
    known = [(day, run, _models(store, run, experiment)) for day, run in runs]
    return tuple(
        change
        for (_, earlier, before), (day, run, after) in pairwise(known)
        for change in changes_between(day, (earlier, run), experiment, (before, after))
    )


def changes_between(
    day: str, pair: tuple[RunRecord, RunRecord], experiment: str, models: tuple[Iterable[str], Iterable[str]]
) -> Iterator[WatchedChange]:
    """Yield what differs between what two runs record; `models` are those that each of them called."""
    old, new = (_facts(run, experiment, called) for run, called in zip(pair, models, strict=True))
    for what in dict.fromkeys((*old, *new)):
        before, after = old.get(what, ""), new.get(what, "")
        if before != after:
            after += _named_parts(*pair) if what == "code" else ""
            yield WatchedChange(day, what, before, after)


def _identity(run: RunRecord) -> Mapping[str, Any]:
    return run.identity or {}


def changed_names(old: RunRecord, new: RunRecord, of: str = "parts") -> list[str]:
    """Return the names of the files and values of the code that differ; none if they were not recorded."""
    before, after = (_identity(run).get(of, {}) for run in (old, new))
    if not before or not after:
        return []
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def _named_parts(old: RunRecord, new: RunRecord) -> str:
    names = changed_names(old, new)
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f" ({', '.join(names[:_NAMED])}{more})" if names else ""


def _facts(run: RunRecord, experiment: str, models: Iterable[str]) -> dict[str, str]:
    """Return what a run records about how its results came about, as short texts by name."""
    identity = _identity(run)
    facts = {"model": listed(names) if (names := sorted(models)) else ""}
    params = run.params.get(experiment)
    for name, value in params.items() if isinstance(params, Mapping) else ():
        facts[f"parameter {name}"] = _short(str(value))
    facts["code"] = run.code_hash[:8]
    evaluator = identity.get("evaluator")
    facts["evaluator"] = " ".join((run.evaluator, str(evaluator[1])[:8])) if evaluator else run.evaluator
    facts |= {f"package {name}": str(version) for name, version in identity.get("packages", {}).items()}
    return facts


def _models(store: RunStore, run: RunRecord, experiment: str) -> set[str]:
    """Return the models that the first trials called."""
    place = run.experiments.index(experiment)
    own = (one for one in store.ordinals(run.run_id, ("scored",)) if run.split(one)[1] == place)
    sessions = (store.session(run.run_id, ordinal) for ordinal in islice(own, _TRIALS))
    return models_of(sessions)


def models_of(sessions: Iterable[SessionView]) -> set[str]:
    """Return the models that were called, as the provider or the trace names them."""
    return {event.model for session in sessions for event in session[PromptExecuted].all() if event.model}


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
