"""Sums of a run: kept while it runs, and computed from its rows."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import sqlalchemy
import sqlalchemy as sa

from fairtrial.base.codec import canonical, decode
from fairtrial.base.codec.escape import escape_text
from fairtrial.base.frozen import EMPTY, JSON
from fairtrial.store import rows
from fairtrial.store.notes import SAMPLING_WEIGHT
from fairtrial.store.protocol import METRIC_CODES, MetricTotals, RunRecord, SampleMeans, Totals, split_facts
from fairtrial.store.schema import results, runs, samples
from fairtrial.trials.result import Outcome

_SHIFT = 32
_ROUNDING = 1e-12  # Of the difference of two sums of squares.
_WANTED = tuple(
    rows.RESULT_COLUMNS.index(name)
    for name in (
        "ordinal", "outcome", "timed", "passed", "value", "reward", "latency_ms", "input_tokens", "output_tokens",
        "cost_usd", "judge_cost_usd",
    )
)  # fmt: skip
_EXTRA_USAGE = tuple(rows.RESULT_COLUMNS.index(name) for name in rows.EXTRA_USAGE)
_ENDINGS = rows.RESULT_COLUMNS.index("unknown_endings")


def pack(latency_ms: int, ordinal: int) -> int:
    """Combine latency and ordinal into one number, whose maximum identifies the slowest trial."""
    return (latency_ms << _SHIFT) + rows.MAX_TRIALS - ordinal


class _Sums:
    """Sum, smallest, largest and sum of squares of some numbers."""

    __slots__ = ("high", "low", "squares", "total")

    def __init__(self) -> None:
        self.total = self.squares = 0.0
        self.low: float | None = None
        self.high: float | None = None

    def add(self, total: float | None, low: float | None, high: float | None, squares: float | None) -> None:
        """Add the sums of further numbers; all None if there are none."""
        if low is None or high is None:
            return
        self.total += total or 0.0
        self.squares += squares or 0.0
        self.low = low if self.low is None else min(self.low, low)
        self.high = high if self.high is None else max(self.high, high)


class SampleSums:
    """Adds up the trials of each sample, for the means over samples."""

    __slots__ = ("_samples",)

    def __init__(self) -> None:
        self._samples: dict[Hashable, list[float]] = {}

    def add(
        self,
        sample: Hashable,
        passed: int | None,
        value: float | None,
        reward: float | None,
        latency_ms: int | None = None,
    ) -> None:
        """Add a finished trial; its values are None if it was not scored, its latency if that does not count."""
        sums = self._samples.setdefault(sample, [0, 0, 0, 0, 0, 0, 0, 0])
        sums[4] += 1
        if passed is not None and value is not None and reward is not None:
            for place, number in enumerate((1, passed, value, reward)):
                sums[place] += number
            sums[5] += reward * reward
        if latency_ms is not None:
            sums[6] += 1
            sums[7] += latency_ms

    def shares(self, weight: Callable[[Any], float] | None = None) -> tuple[float, ...]:
        """Return what `sample_means` takes; `weight` says how many samples a sample stands for."""
        found = [0.0] * (7 if weight is None else 10)
        for sample, (scored, passed, value, reward, finished, squares, *timed) in self._samples.items():
            own = (1, passed / scored, value / scored, reward / scored) if scored else (0, 0, 0, 0)
            more = () if weight is None else (squares / scored if scored else 0, *timed)
            stands_for = 1.0 if weight is None else weight(sample)
            for place, number in enumerate((*own, 1, passed / finished, value / finished, *more)):
                found[place] += number * stands_for
        return tuple(found)


def sample_means(sums: Sequence[float]) -> SampleMeans:
    """Return the means over samples.

    The sums are the number of samples with a scored trial and the sums of their means (passed, value, reward), then
    the number of samples with a finished trial and the sums of theirs (passed, value). Of samples with weights, the sum
    of the squared rewards, the number of trials whose latency counts, and its sum follow.
    """
    scored, *own, finished, passed, value = sums[:7]
    means = [one / scored if scored else None for one in own]
    found = SampleMeans(*means, *(one / finished if finished else None for one in (passed, value)))
    if len(sums) == 7:
        return found
    squares, timed, latency = sums[7:]
    variance = squares / scored - (own[2] / scored) ** 2 if scored else None
    if variance is not None and variance < _ROUNDING * squares / scored:
        variance = 0.0  # All rewards are equal.
    return found._replace(reward_variance=variance, mean_latency_ms=latency / timed if timed else None)


def analysed_samples(run: RunRecord) -> int:
    """Return how many samples, from the start of the plan, are in the means of a run.

    A run that decided by its results when to stop is described by the samples on which it decided: results beyond
    them are stored and counted, but they are not in its rates and means.
    """
    note = run.noted.adaptive
    return run.dataset_size if note is None else note.samples


def unequal(run: RunRecord, tallies: Iterable[TotalsBuilder]) -> bool:
    """Return whether means need a sum for each sample: their numbers of scored trials differ, or not all are in them.

    Of a run of which not all samples are in the means, every group starts with none; so does one of a run whose samples
    have weights.
    """
    found = list(tallies)
    if run.noted.adaptive is not None or run.noted.sampling is not None:
        for tally in found:
            tally.add_samples(*[0.0] * (7 if run.noted.sampling is None else 10))
        return True
    return run.repeats > 1 and sum(tally.scored for tally in found) < run.planned


class TotalsBuilder:
    """Adds up the results of one experiment, or of one group in it."""

    __slots__ = ("_cost", "_endings", "_extra", "_judge_cost", "_latency", "_outcomes", "_passed", "_rewards",
                 "_samples", "_slowest", "_timed", "_tokens", "_values", "own_rewards")  # fmt: skip

    def __init__(self) -> None:
        self._outcomes: dict[Outcome, int] = {}
        self._timed = self._passed = self._latency = 0
        self._values = _Sums()
        self._rewards = _Sums()
        self.own_rewards = 0  # Results whose reward differs from their value; if there are none, no reward is added.
        self._tokens = [0, 0]
        self._cost: float | None = None
        self._judge_cost: float | None = None
        self._extra = dict.fromkeys(rows.EXTRA_USAGE, 0)
        self._endings: dict[str, int] = {}
        self._slowest: int | None = None
        self._samples: list[float] | None = None

    @property
    def scored(self) -> int:
        """The number of scored trials."""
        return self._outcomes.get("scored", 0)

    def add_group(
        self,
        counts: Sequence[int],
        timed: int,
        passed: int | None,
        value_sum: float | None,
        value_min: float | None,
        value_max: float | None,
        squares: float | None,
        own_rewards: int,
        latency: int | None,
        slowest: int | None,
        input_tokens: int | None,
        output_tokens: int | None,
        cost: float | None,
        judge_cost: float | None,
    ) -> None:
        """Add sums from a database; `counts` are by outcome, in the order of `OUTCOME_NAMES`.

        Empty sums are None, as in SQL.
        """
        for name, count in zip(rows.OUTCOME_NAMES.values(), counts, strict=True):
            if count:
                self._outcomes[name] = self._outcomes.get(name, 0) + count
        self._passed += int(passed or 0)
        self._values.add(value_sum, value_min, value_max, squares)
        self.own_rewards += own_rewards
        self._timed += timed
        if latency is not None and slowest is not None:
            self._latency += int(latency)
            self._slowest = int(slowest) if self._slowest is None else max(self._slowest, int(slowest))
        for place, tokens in enumerate((input_tokens, output_tokens)):
            self._tokens[place] += int(tokens or 0)
        if cost is not None:
            self._cost = (self._cost or 0.0) + cost
        if judge_cost is not None:
            self._judge_cost = (self._judge_cost or 0.0) + judge_cost

    def add_rewards(self, total: float | None, low: float | None, high: float | None, squares: float | None) -> None:
        """Add the sums of rewards, including those that equal the value."""
        self._rewards.add(total, low, high, squares)

    def add_samples(self, *sums: float | None) -> None:
        """Add the sums of further samples (see `sample_means`); empty ones are None, as in SQL."""
        known = self._samples or [0.0] * len(sums)
        self._samples = [one + float(more or 0) for one, more in zip(known, sums, strict=True)]

    def add_extra_usage(self, *sums: int | None) -> None:
        """Add the sums of rare usage columns, in the order of `EXTRA_USAGE`."""
        for name, number in zip(rows.EXTRA_USAGE, sums, strict=True):
            self._extra[name] += int(number or 0)

    def add_endings(self, text: str | None, trials: int = 1) -> None:
        """Add the unknown endings of this many trials that have the same."""
        for name, count in rows.read_endings(text).items() if text is not None else ():
            self._endings[name] = self._endings.get(name, 0) + count * trials

    def add_row(self, row: tuple[Any, ...]) -> None:
        """Add one result row."""
        ordinal, outcome, timed, passed, value, reward, latency, *spent = [row[place] for place in _WANTED]
        counts = [int(code == outcome) for code in rows.OUTCOME_NAMES]
        squared = None if value is None else value * value
        duration, slowest = (latency, pack(latency, ordinal)) if timed else (None, None)
        own = int(reward is not None)
        self.add_group(counts, timed, passed, value, value, value, squared, own, duration, slowest, *spent)
        self.add_extra_usage(*(row[place] for place in _EXTRA_USAGE))
        self.add_endings(row[_ENDINGS])
        if value is not None:
            number = reward if own else value
            self.add_rewards(number, number, number, number * number)

    def totals(self, experiment: str, sample_id: Callable[[int], str]) -> Totals:
        """Return the sums; `sample_id` returns the sample id for the ordinal of a trial."""
        slowest, values = self._slowest, self._values
        rewards = self._rewards if self.own_rewards else values
        return Totals(
            experiment=experiment,
            outcomes=self._outcomes,
            passed=self._passed,
            value_sum=values.total,
            value_min=values.low,
            value_max=values.high,
            value_squares=values.squares,
            reward_sum=rewards.total,
            reward_min=rewards.low,
            reward_max=rewards.high,
            reward_squares=rewards.squares,
            latency_sum=self._latency,
            latency_max=0 if slowest is None else slowest >> _SHIFT,
            slowest=None if slowest is None else sample_id(rows.MAX_TRIALS - (slowest & rows.MAX_TRIALS)),
            timed=self._timed,
            input_tokens=self._tokens[0],
            output_tokens=self._tokens[1],
            cost_usd=self._cost,
            judge_cost_usd=self._judge_cost,
            unknown_endings=dict(sorted(self._endings.items())) or EMPTY,
            sample_means=None if self._samples is None else sample_means(self._samples),
            **self._extra,
        )


class MetricSums:
    """Adds up metrics, one result at a time."""

    __slots__ = ("_sums",)

    def __init__(self) -> None:
        self._sums: dict[str, dict[str, list[float]]] = {}

    def add(self, experiment: str, metrics: Mapping[str, float], verdicts: str | None) -> None:
        """Add the metrics of one scored trial, with the verdict of each."""
        sums = self._sums.setdefault(experiment, {})
        for name, value in metrics.items():
            found = sums.setdefault(name, [0, 0.0, 0, 0])
            found[0] += 1
            found[1] += value
        if verdicts is not None:
            for name, code in zip(metrics, split_facts(verdicts)[0], strict=True):
                passed, _ = METRIC_CODES[code]
                if passed is not None:
                    found = sums[name]
                    found[2] += 1
                    found[3] += passed

    def totals(self) -> dict[str, dict[str, MetricTotals]]:
        """Return experiment -> metric -> its totals."""
        return {
            experiment: {
                name: MetricTotals(int(count), total / count, int(judged), int(passed))
                for name, (count, total, judged, passed) in sums.items()
            }
            for experiment, sums in self._sums.items()
        }


_LATENCY = sa.func.sum(results.c.latency_ms)
# Latency and ordinal in one number: see `totals.pack`.
_SLOWEST = sa.func.max(
    results.c.latency_ms * sa.literal(rows.MAX_TRIALS + 1, sa.BigInteger) + (rows.MAX_TRIALS - results.c.ordinal)
)
_VALUES: tuple[sa.ColumnElement[Any], ...] = (
    sa.func.sum(results.c.passed),
    sa.func.sum(results.c.value),
    sa.func.min(results.c.value),
    sa.func.max(results.c.value),
    sa.func.sum(results.c.value * results.c.value),
    sa.func.count(results.c.reward),
)
# Most runs have no rewards of their own. These sums take most of the time of a scan, so they are made only if needed.
_REWARD = sa.func.coalesce(results.c.reward, results.c.value)
_REWARDS = (sa.func.sum(_REWARD), sa.func.min(_REWARD), sa.func.max(_REWARD), sa.func.sum(_REWARD * _REWARD))
_USAGE: tuple[sa.ColumnElement[Any], ...] = (
    sa.func.sum(results.c.input_tokens),
    sa.func.sum(results.c.output_tokens),
    sa.func.sum(results.c.cost_usd),
    sa.func.sum(results.c.judge_cost_usd),
)
# Most runs have none of these, and `runs.extra_usage` says so.
_EXTRA_USAGE_SUMS = tuple(sa.func.sum(results.c[name]) for name in rows.EXTRA_USAGE)

# SQLite groups by sorting; for a few experiments, one plain scan for each takes half the time.
_FEW_EXPERIMENTS = 6
_TIMED = results.c.timed == 1
_COUNTS = tuple(sa.func.count().filter(results.c.outcome == code) for code in rows.OUTCOME_NAMES)
_SCAN = sa.select(
    *_COUNTS,
    sa.func.count().filter(_TIMED),
    *_VALUES,
    _LATENCY.filter(_TIMED),
    _SLOWEST.filter(_TIMED),
    *_USAGE,
)

# One small number to group by sorts faster than three columns.
_GROUP = (results.c.experiment * 16 + results.c.outcome * 2 + results.c.timed).label("part")
_GROUPED = (_GROUP, sa.func.count(), *_VALUES, _LATENCY, _SLOWEST, *_USAGE)


def dataset_of(number: int) -> sa.ColumnElement[int]:
    """Return the subquery for a run's dataset, evaluated inside each query: it may change while the run is read."""
    return sa.select(runs.c.dataset).where(runs.c.id == number).scalar_subquery()


def totals(connection: sa.Connection, number: int, run: RunRecord) -> list[Totals]:
    """Return the sums per experiment."""
    tallies = [TotalsBuilder() for _ in run.experiments]
    if connection.dialect.name == "sqlite" and len(tallies) <= _FEW_EXPERIMENTS:
        for place, tally in enumerate(tallies):
            query = _SCAN.where(results.c.run == number, results.c.experiment == place)
            sums: tuple[Any, ...] = tuple(connection.execute(query).one())
            tally.add_group(sums[: len(_COUNTS)], *sums[len(_COUNTS) :])
    else:
        for part in connection.execute(_grouped(number)):
            _add_part(tallies.__getitem__, *part)
    if any(tally.own_rewards for tally in tallies):
        for place, *rewards in connection.execute(_rewards(number)):
            tallies[place].add_rewards(*rewards)
    if unequal(run, tallies):
        source = results if run.noted.sampling is None else _with_samples(number)
        for place, *means in connection.execute(_by_sample(number, run, source, _weight(connection.dialect.name, run))):
            tallies[place].add_samples(*means)
    if _has_extra_usage(connection, number):
        for place, *extra in connection.execute(_extra_usage(number)):
            tallies[place].add_extra_usage(*extra)
        for place, endings, trials in connection.execute(_endings(number)):
            tallies[place].add_endings(endings, trials)
    name_of = _sample_names(connection, number, run)
    return [tally.totals(name, name_of) for name, tally in zip(run.experiments, tallies, strict=True)]


def group_totals(connection: sa.Connection, number: int, run: RunRecord, key: str) -> list[tuple[JSON, Totals]]:
    """Return the sums per experiment and value of a metadata key."""
    groups: dict[tuple[int, bytes], tuple[JSON, TotalsBuilder]] = {}
    extract = _extract(connection.dialect.name, escape_text(key))
    # Where the database has no path for the key, group by the whole metadata and pick the value here.
    value_json = (samples.c.metadata if extract is None else extract).label("value_json")
    joined = _with_samples(number)

    def tallies_of(found: str | None) -> Callable[[int], TotalsBuilder]:
        value: Any = None if found is None else decode(object, found)
        if extract is None:
            value = value.get(key) if isinstance(value, dict) else None
        return lambda place: groups.setdefault((place, canonical(value)), (value, TotalsBuilder()))[1]

    for *row, found in connection.execute(_grouped(number, value_json).select_from(joined)):
        _add_part(tallies_of(found), *row)
    if any(tally.own_rewards for _, tally in groups.values()):
        for place, *rewards, found in connection.execute(_rewards(number, value_json).select_from(joined)):
            tallies_of(found)(place).add_rewards(*rewards)
    if unequal(run, (tally for _, tally in groups.values())):
        weight = _weight(connection.dialect.name, run)
        for place, *means, found in connection.execute(_by_sample(number, run, joined, weight, value_json)):
            tallies_of(found)(place).add_samples(*means)
    if _has_extra_usage(connection, number):
        for place, *sums, found in connection.execute(_extra_usage(number, value_json).select_from(joined)):
            tallies_of(found)(place).add_extra_usage(*sums)
        for place, endings, trials, found in connection.execute(_endings(number, value_json).select_from(joined)):
            tallies_of(found)(place).add_endings(endings, trials)
    name_of = _sample_names(connection, number, run)
    return [
        (value, tally.totals(run.experiments[place], name_of))
        for (place, _text), (value, tally) in sorted(groups.items(), key=lambda item: item[0])
    ]


def _with_samples(number: int) -> sa.FromClause:
    """Return the results of a run beside their samples."""
    own = sa.and_(samples.c.dataset == dataset_of(number), samples.c.ordinal == results.c.sample)
    return results.outerjoin(samples, own)


def _grouped(number: int, *by: sa.ColumnElement[Any]) -> sa.Select[Any]:
    return sa.select(*_GROUPED, *by).where(results.c.run == number).group_by(_GROUP, *by)


def _rewards(number: int, *by: sa.ColumnElement[Any]) -> sa.Select[Any]:
    query = sa.select(results.c.experiment, *_REWARDS, *by).where(results.c.run == number, results.c.value.is_not(None))
    return query.group_by(results.c.experiment, *by)


def _by_sample(
    number: int, run: RunRecord, source: sa.FromClause, weight: sa.ColumnElement[Any], *by: sa.ColumnElement[Any]
) -> sa.Select[Any]:
    """Return the query for what `TotalsBuilder.add_samples` takes; samples with weights count as often."""
    each = (
        sa.select(
            results.c.experiment,
            sa.func.count(results.c.value).label("scored"),
            sa.func.count().filter(results.c.outcome != rows.NOT_RUN).label("finished"),
            sa.cast(sa.func.sum(results.c.passed), sa.Double).label("passed"),
            sa.func.sum(results.c.value).label("value"),
            sa.func.sum(_REWARD).label("reward"),
            sa.func.sum(_REWARD * _REWARD).label("squares"),
            sa.func.count().filter(_TIMED).label("timed"),
            sa.func.sum(results.c.latency_ms).filter(_TIMED).label("latency"),
            sa.func.max(weight).label("weight"),
            *by,
        )
        .select_from(source)
        .where(results.c.run == number, results.c.sample < analysed_samples(run))
        .group_by(results.c.experiment, results.c.sample, *by)
        .subquery()
    )
    scored, finished = sa.func.nullif(each.c.scored, 0), sa.func.nullif(each.c.finished, 0)
    own = each.c.weight
    more = [
        sa.func.sum(own * each.c.squares / scored),
        *(sa.func.sum(own * each.c[name]) for name in ("timed", "latency")),
    ]
    groups = (each.c.experiment, *(each.c[one.name] for one in by))
    return sa.select(
        each.c.experiment,
        sa.func.sum(own).filter(each.c.scored > 0),
        *(sa.func.sum(own * each.c[name] / scored) for name in ("passed", "value", "reward")),
        sa.func.sum(own).filter(each.c.finished > 0),
        *(sa.func.sum(own * each.c[name] / finished) for name in ("passed", "value")),
        *(() if run.noted.sampling is None else more),
        *groups[1:],
    ).group_by(*groups)


def _extra_usage(number: int, *by: sa.ColumnElement[Any]) -> sa.Select[Any]:
    query = sa.select(results.c.experiment, *_EXTRA_USAGE_SUMS, *by).where(results.c.run == number)
    return query.group_by(results.c.experiment, *by)


def _endings(number: int, *by: sa.ColumnElement[Any]) -> sa.Select[Any]:
    column = results.c.unknown_endings
    query = sa.select(results.c.experiment, column, sa.func.count(), *by).where(
        results.c.run == number, column.is_not(None)
    )
    return query.group_by(results.c.experiment, column, *by)


def _has_extra_usage(connection: sa.Connection, number: int) -> bool:
    return bool(connection.execute(sa.select(runs.c.extra_usage).where(runs.c.id == number)).scalar_one())


def _add_part(tally_of: Callable[[int], TotalsBuilder], part: int, count: int, *sums: Any) -> None:
    """Add the sums of one experiment, outcome and kind of timing."""
    experiment, rest = divmod(part, 16)
    outcome, timed = divmod(rest, 2)
    passed, value, low, high, squares, own_rewards, latency, slowest, *usage = sums
    counts = [count if code == outcome else 0 for code in rows.OUTCOME_NAMES]
    durations = (latency, slowest) if timed else (None, None)
    tally_of(experiment).add_group(
        counts, count if timed else 0, passed, value, low, high, squares, own_rewards, *durations, *usage
    )


def _sample_names(connection: sa.Connection, number: int, run: RunRecord) -> Callable[[int], str]:
    def name_of(ordinal: int) -> str:
        place = run.split(ordinal)[0]
        query = sa.select(samples.c.id).where(samples.c.dataset == dataset_of(number), samples.c.ordinal == place)
        return rows.restored_text(connection.execute(query).scalar_one())

    return name_of


def _weight(dialect: str, run: RunRecord) -> sa.ColumnElement[Any]:
    """Return the SQL for how many samples a sample of a run stands for."""
    if run.noted.sampling is None:
        return sa.literal(1)
    if dialect == "sqlite":  # Of any version, other than "->".
        found: Any = sa.func.json_extract(samples.c.metadata, f"$.{SAMPLING_WEIGHT}")
    else:
        found = _extract(dialect, SAMPLING_WEIGHT)
    return sa.func.coalesce(sa.cast(found, sa.Double), 1.0)


def _extract(dialect: str, key: str) -> sa.ColumnElement[Any] | None:
    """Return the SQL for a metadata value as JSON text; None if this database has no path for the key."""
    if dialect == "postgresql":
        return sa.cast(sa.cast(samples.c.metadata, sqlalchemy.JSON).op("->")(sa.literal(key, sa.Text)), sa.Text)
    # SQLite compares a path with the JSON text as it is written, where these would be escaped.
    if not key or not key.isprintable() or '"' in key or "\\" in key or sqlite3.sqlite_version_info < (3, 38):
        return None
    return samples.c.metadata.op("->", return_type=sa.Text())(sa.literal(f'$."{key}"', sa.Text))
