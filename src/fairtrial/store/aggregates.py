"""Sums over a run's results, computed by the database."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any

import sqlalchemy
from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Double,
    FromClause,
    Select,
    Text,
    and_,
    cast,
    func,
    literal,
    select,
)

from fairtrial.base.codec import canonical, decode
from fairtrial.base.codec.escape import escape_text
from fairtrial.base.types import JSON
from fairtrial.store.protocol import RunRecord, Totals
from fairtrial.store.rows import EXTRA_USAGE, MAX_TRIALS, NOT_RUN, OUTCOME_NAMES, text_of
from fairtrial.store.schema import results, runs, samples
from fairtrial.store.totals import TotalsBuilder, analysed_samples, unequal

_LATENCY = func.sum(results.c.latency_ms)
# Latency and ordinal in one number: see `totals.pack`.
_SLOWEST = func.max(results.c.latency_ms * literal(MAX_TRIALS + 1, BigInteger) + (MAX_TRIALS - results.c.ordinal))
_VALUES: tuple[ColumnElement[Any], ...] = (
    func.sum(results.c.passed),
    func.sum(results.c.value),
    func.min(results.c.value),
    func.max(results.c.value),
    func.sum(results.c.value * results.c.value),
    func.count(results.c.reward),
)
# Most runs have no rewards of their own. These sums take most of the time of a scan, so they are made only if needed.
_REWARD = func.coalesce(results.c.reward, results.c.value)
_REWARDS = (func.sum(_REWARD), func.min(_REWARD), func.max(_REWARD), func.sum(_REWARD * _REWARD))
_USAGE: tuple[ColumnElement[Any], ...] = (
    func.sum(results.c.input_tokens),
    func.sum(results.c.output_tokens),
    func.sum(results.c.cost_usd),
    func.sum(results.c.judge_cost_usd),
)
# Most runs have none of these, and `runs.extra_usage` says so.
_EXTRA_USAGE = tuple(func.sum(results.c[name]) for name in EXTRA_USAGE)

# SQLite groups by sorting; for a few experiments, one plain scan for each takes half the time.
_FEW_EXPERIMENTS = 6
_TIMED = results.c.timed == 1
_COUNTS = tuple(func.count().filter(results.c.outcome == code) for code in OUTCOME_NAMES)
_SCAN = select(
    *_COUNTS,
    func.count().filter(_TIMED),
    *_VALUES,
    _LATENCY.filter(_TIMED),
    _SLOWEST.filter(_TIMED),
    *_USAGE,
)

# One small number to group by sorts faster than three columns.
_GROUP = (results.c.experiment * 16 + results.c.outcome * 2 + results.c.timed).label("part")
_GROUPED = (_GROUP, func.count(), *_VALUES, _LATENCY, _SLOWEST, *_USAGE)


def dataset_of(number: int) -> ColumnElement[int]:
    """Return the subquery for a run's dataset, evaluated inside each query: it may change while the run is read."""
    return select(runs.c.dataset).where(runs.c.id == number).scalar_subquery()


def totals(connection: Connection, number: int, run: RunRecord) -> list[Totals]:
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
        for place, *means in connection.execute(_by_sample(number, run, results)):
            tallies[place].add_samples(*means)
    if _has_extra_usage(connection, number):
        for place, *extra in connection.execute(_extra_usage(number)):
            tallies[place].add_extra_usage(*extra)
        for place, endings, trials in connection.execute(_endings(number)):
            tallies[place].add_endings(endings, trials)
    name_of = _sample_names(connection, number, run)
    return [tally.totals(name, name_of) for name, tally in zip(run.experiments, tallies, strict=True)]


def group_totals(connection: Connection, number: int, run: RunRecord, key: str) -> list[tuple[JSON, Totals]]:
    """Return the sums per experiment and value of a metadata key."""
    groups: dict[tuple[int, bytes], tuple[JSON, TotalsBuilder]] = {}
    extract = _extract(connection.dialect.name, escape_text(key))
    # Where the database has no path for the key, group by the whole metadata and pick the value here.
    value_json = (samples.c.metadata if extract is None else extract).label("value_json")
    joined = results.outerjoin(
        samples, and_(samples.c.dataset == dataset_of(number), samples.c.ordinal == results.c.sample)
    )

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
        for place, *means, found in connection.execute(_by_sample(number, run, joined, value_json)):
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


def _grouped(number: int, *by: ColumnElement[Any]) -> Select[Any]:
    return select(*_GROUPED, *by).where(results.c.run == number).group_by(_GROUP, *by)


def _rewards(number: int, *by: ColumnElement[Any]) -> Select[Any]:
    query = select(results.c.experiment, *_REWARDS, *by).where(results.c.run == number, results.c.value.is_not(None))
    return query.group_by(results.c.experiment, *by)


def _by_sample(number: int, run: RunRecord, source: FromClause, *by: ColumnElement[Any]) -> Select[Any]:
    """Return the query for what `TotalsBuilder.add_samples` takes."""
    each = (
        select(
            results.c.experiment,
            func.count(results.c.value).label("scored"),
            func.count().filter(results.c.outcome != NOT_RUN).label("finished"),
            cast(func.sum(results.c.passed), Double).label("passed"),
            func.sum(results.c.value).label("value"),
            func.sum(_REWARD).label("reward"),
            *by,
        )
        .select_from(source)
        .where(results.c.run == number, results.c.sample < analysed_samples(run))
        .group_by(results.c.experiment, results.c.sample, *by)
        .subquery()
    )
    scored, finished = func.nullif(each.c.scored, 0), func.nullif(each.c.finished, 0)
    groups = (each.c.experiment, *(each.c[one.name] for one in by))
    return select(
        each.c.experiment,
        func.count(scored),
        *(func.sum(each.c[name] / scored) for name in ("passed", "value", "reward")),
        func.count(finished),
        *(func.sum(each.c[name] / finished) for name in ("passed", "value")),
        *groups[1:],
    ).group_by(*groups)


def _extra_usage(number: int, *by: ColumnElement[Any]) -> Select[Any]:
    query = select(results.c.experiment, *_EXTRA_USAGE, *by).where(results.c.run == number)
    return query.group_by(results.c.experiment, *by)


def _endings(number: int, *by: ColumnElement[Any]) -> Select[Any]:
    column = results.c.unknown_endings
    query = select(results.c.experiment, column, func.count(), *by).where(results.c.run == number, column.is_not(None))
    return query.group_by(results.c.experiment, column, *by)


def _has_extra_usage(connection: Connection, number: int) -> bool:
    return bool(connection.execute(select(runs.c.extra_usage).where(runs.c.id == number)).scalar_one())


def _add_part(tally_of: Callable[[int], TotalsBuilder], part: int, count: int, *sums: Any) -> None:
    """Add the sums of one experiment, outcome and kind of timing."""
    experiment, rest = divmod(part, 16)
    outcome, timed = divmod(rest, 2)
    passed, value, low, high, squares, own_rewards, latency, slowest, *usage = sums
    counts = [count if code == outcome else 0 for code in OUTCOME_NAMES]
    durations = (latency, slowest) if timed else (None, None)
    tally_of(experiment).add_group(
        counts, count if timed else 0, passed, value, low, high, squares, own_rewards, *durations, *usage
    )


def _sample_names(connection: Connection, number: int, run: RunRecord) -> Callable[[int], str]:
    def name_of(ordinal: int) -> str:
        place = run.split(ordinal)[0]
        query = select(samples.c.id).where(samples.c.dataset == dataset_of(number), samples.c.ordinal == place)
        return text_of(connection.execute(query).scalar_one())

    return name_of


def _extract(dialect: str, key: str) -> ColumnElement[Any] | None:
    """Return the SQL for a metadata value as JSON text; None if this database has no path for the key."""
    if dialect == "postgresql":
        return cast(cast(samples.c.metadata, sqlalchemy.JSON).op("->")(literal(key, Text)), Text)
    # SQLite compares a path with the JSON text as it is written, where these would be escaped.
    if not key or not key.isprintable() or '"' in key or "\\" in key or sqlite3.sqlite_version_info < (3, 38):
        return None
    return samples.c.metadata.op("->", return_type=Text())(literal(f'$."{key}"', Text))
