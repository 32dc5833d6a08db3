"""Strengths of systems from comparisons of two outputs: Bradley and Terry's model with ties."""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from fairtrial.errors import ConfigurationError
from fairtrial.stats._arrays import FloatArray, IntArray, Undefined, as_clusters, check_level, t_quantile, two_sided
from fairtrial.stats.ranking import Estimates, SimultaneousDifferences, SystemPairs, normal_maxima, ranking_of
from fairtrial.stats.resampling import DRAWS

TIE = "tie"
"""The winner of a comparison that ended in a tie."""

_STEPS, _CLOSE_ENOUGH = 200, 1e-10
_OPPONENT = 0.5  # Wins, and losses, of each system against an imagined opponent of strength 0.


@dataclass(frozen=True, slots=True)
class Preference:
    """One comparison: the system shown first, the one shown second, and which of them won; None or "tie" for a tie.

    `cluster` groups comparisons that are not independent: the sample that both systems answered. Without one, the
    comparison is independent of all others.
    """

    first: str
    second: str
    winner: str | None
    cluster: Hashable = None

    def __post_init__(self) -> None:
        if not isinstance(self.first, str):
            raise TypeError(f"first must be the name of a system (got {self.first!r})")


@dataclass(frozen=True, slots=True)
class Strength:
    """One system: how strong it is, on the scale of log odds, relative to the mean of all systems.

    `low` and `high` are the interval of the strength alone; an end is None where the system won, or lost, everything,
    so that the data do not bound it. The true rank lies between `rank_low` and `rank_high`, for all systems together.
    `best` is the probability that it is the strongest.
    """

    name: str
    strength: float
    low: float | None
    high: float | None
    rank: int
    rank_low: int
    rank_high: int
    best: float
    wins: int
    losses: int
    ties: int


@dataclass(frozen=True, slots=True, eq=False)
class BradleyTerry:
    """Systems in the order of their strength, the strongest first.

    `tie` is the parameter of ties: two equal systems tie with probability tie/(2 + tie); 0 without ties. `order_effect`
    is the advantage, in log odds, of being shown first, and None if it was not estimated. `pairs` are differences of
    strengths with intervals that hold together.
    """

    systems: tuple[Strength, ...]
    tie: float
    order_effect: float | None
    n: int
    clusters: int
    level: float
    pairs: SimultaneousDifferences
    names: tuple[str, ...]
    notes: tuple[str, ...]

    def __getitem__(self, name: str) -> Strength:
        for one in self.systems:
            if one.name == name:
                return one
        raise KeyError(f"there is no system {name!r}; the compared systems are {', '.join(self.names)}")


def bradley_terry(
    preferences: Iterable[Preference | tuple[str, str, str | None]],
    *,
    order_effect: bool = False,
    level: float = 0.95,
    draws: int = DRAWS,
    seed: int = 0,
) -> BradleyTerry | Undefined:
    """Rank systems by comparisons of two of them at a time. Bradley and Terry (1952), with ties Davidson (1970).

    With strengths a and b on the log scale, the first wins with probability exp(a)/D, the second with exp(b)/D, and
    they tie with v exp((a+b)/2)/D, where D is the sum of the three. `order_effect` adds a parameter to the strength of
    what is shown first (Davidson and Beaver 1977); where every pair is asked in both orders, the ranking does not need
    it.

    - Every system also has half a win and half a loss against an imagined opponent of strength 0, and the other
      parameters have as much to hold them. So a system that won everything has a finite strength; its interval has no
      upper end, and `notes` say so.
    - Errors are of the sandwich kind, over whole clusters (times C/(C-1)), with t(C-1): the answers about one sample in
      both orders, or by several pairs of systems, are not independent.
    - Ranks are those of `rank_systems`, by draws of normal strengths with that covariance.

    A system that was always shown first, or always second, has its place and its strength mixed up: without
    `order_effect` no rank is determined, as `notes` say. Systems that no chain of comparisons connects cannot be ranked
    together: refused. Undefined below two clusters.
    """
    check_level(level)
    given = [one if isinstance(one, Preference) else Preference(*one) for one in preferences]
    data = _Comparisons.of(given)
    if data.clusters < 2:
        return Undefined("A ranking needs comparisons about at least two samples.")
    model = _Davidson(data, order_effect=order_effect)
    values = model.fit()
    m = len(data.names)
    covariance = model.covariance(values)
    # Strengths are relative to their mean, which takes out the pull of the imagined opponent on all of them.
    centre = np.eye(m) - 1 / m
    strengths = centre @ values[:m]
    own = centre @ covariance[:m, :m] @ centre.T
    pairs = SystemPairs.of(m, None)
    df = float(data.clusters - 1)
    spread = np.diag(own)[pairs.first] + np.diag(own)[pairs.second] - 2 * own[pairs.first, pairs.second]
    estimates = Estimates(strengths, own, pairs.differences(strengths), np.sqrt(spread), df)
    ranking = ranking_of(
        estimates,
        pairs,
        [normal_maxima(estimates, pairs, True, draws, seed)],
        higher_is_better=True,
        level=level,
        n=len(given),
        clusters=data.clusters,
        draws=draws,
        method="max-T of normal strengths",
        notes=() if order_effect else data.one_sided(),
    )
    half = t_quantile(two_sided(level), df) * np.sqrt(np.diag(own))
    systems = []
    for place, name in enumerate(data.names):
        wins, losses, ties = data.record(place)
        systems.append(
            Strength(
                name=name,
                strength=float(strengths[place]),
                low=None if not wins + ties else float(strengths[place] - half[place]),
                high=None if not losses + ties else float(strengths[place] + half[place]),
                rank=int(ranking.ranks[place]),
                rank_low=int(ranking.best_ranks[place]),
                rank_high=int(ranking.worst_ranks[place]),
                best=float(ranking.best_chances[place]),
                wins=wins,
                losses=losses,
                ties=ties,
            )
        )
    return BradleyTerry(
        systems=tuple(sorted(systems, key=lambda one: one.rank)),
        tie=float(np.exp(values[m])) if data.ties else 0.0,
        order_effect=float(values[-1]) if order_effect else None,
        n=len(given),
        clusters=data.clusters,
        level=level,
        pairs=ranking.pairs,
        names=data.names,
        notes=(*(() if order_effect else data.one_sided()), *_notes(data, systems)),
    )


def _notes(data: "_Comparisons", systems: Sequence[Strength]) -> Iterable[str]:
    bounded = 0
    for one in systems:
        if one.low is None or one.high is None:
            what = "won" if one.high is None else "lost"
            end = "upper" if one.high is None else "lower"
            yield f"{one.name} {what} every comparison: its strength has no {end} end."
        else:
            bounded += 1
    groups = data.groups_by_wins()
    if len(groups) > 1 and bounded == len(systems):
        shown = "; ".join(", ".join(group) for group in groups)
        yield f"Some systems never lost to others ({shown}): how far these groups are apart is not known."


@dataclass(frozen=True, slots=True, eq=False)
class _Comparisons:
    """Comparisons as arrays: the first and the second system, and the outcome: 0 or 1 for who won, 2 for a tie."""

    names: tuple[str, ...]
    first: IntArray
    second: IntArray
    outcome: IntArray
    codes: IntArray
    clusters: int

    def one_sided(self) -> tuple[str, ...]:
        """Say of systems that were always shown in the same place that their ranks are not determined."""
        found = []
        for place, name in enumerate(self.names):
            counts = int(np.count_nonzero(self.first == place)), int(np.count_nonzero(self.second == place))
            if not all(counts) and sum(counts) > 1:
                where = "first" if counts[0] else "second"
                way_on = "ask in both orders, or set order_effect"
                found.append(f"{name} was always shown {where}, and judges prefer places: {way_on}.")
        return tuple(found)

    @property
    def ties(self) -> bool:
        """Whether there are ties."""
        return bool(np.any(self.outcome == 2))

    @classmethod
    def of(cls, given: Sequence[Preference]) -> "_Comparisons":
        """Check the comparisons, and that a chain of them leads from every system to every other."""
        if not given:
            raise ConfigurationError("a ranking needs at least one comparison (got none)")
        for one in given:
            if one.first == one.second:
                raise ConfigurationError(f"a comparison must be of two systems (got {one.first!r} twice)")
            if one.winner not in (one.first, one.second, None, TIE):
                raise ConfigurationError(
                    f"the winner must be {one.first!r}, {one.second!r}, or None for a tie (got {one.winner!r})"
                )
        names = tuple(dict.fromkeys(name for one in given for name in (one.first, one.second)))
        place = {name: number for number, name in enumerate(names)}
        groups = as_clusters([one.cluster for one in given], len(given))
        made = cls(
            names,
            np.asarray([place[one.first] for one in given], dtype=np.intp),
            np.asarray([place[one.second] for one in given], dtype=np.intp),
            np.asarray([(one.first, one.second, one.winner).index(one.winner) for one in given], dtype=np.intp),
            groups.codes,
            groups.count,
        )
        parts = made._components(made.first, made.second, directed=False)
        if len(parts) > 1:
            raise ConfigurationError(
                f"no comparison connects {parts[0][0]!r} with {parts[1][0]!r}, so they cannot be ranked together: "
                f"compare systems of both groups, or rank them on their own ({'; '.join(map(', '.join, parts))})"
            )
        return made

    def record(self, system: int) -> tuple[int, int, int]:
        """The wins, losses and ties of a system."""
        mine, other = self.first == system, self.second == system
        found = Counter(np.where(mine, self.outcome, 1 - self.outcome)[(mine | other) & (self.outcome < 2)].tolist())
        return found[0], found[1], int(np.count_nonzero((mine | other) & (self.outcome == 2)))

    def groups_by_wins(self) -> list[list[str]]:
        """The groups within which every system was, in a chain, beaten or tied with: one group unless separated."""
        winner = np.where(self.outcome == 1, self.second, self.first)
        loser = np.where(self.outcome == 1, self.first, self.second)
        tied = self.outcome == 2
        return self._components(
            np.concatenate([winner, loser[tied]]), np.concatenate([loser, winner[tied]]), directed=True
        )

    def _components(self, start: IntArray, end: IntArray, *, directed: bool) -> list[list[str]]:
        from scipy.sparse import csr_array  # Imported late: slow to load, and only Bradley-Terry needs it.
        from scipy.sparse.csgraph import connected_components

        m = len(self.names)
        graph = csr_array((np.ones(start.size), (start, end)), shape=(m, m))
        _, labels = connected_components(graph, directed=directed, connection="strong")
        groups: dict[int, list[str]] = {}
        for name, label in zip(self.names, labels.tolist(), strict=True):
            groups.setdefault(label, []).append(name)
        return list(groups.values())


class _Davidson:
    """The likelihood: a choice among three outcomes whose logarithms are linear in the parameters, so it is concave.

    Parameters are the strengths, the logarithm of v if there are ties, and the effect of the order if it is wanted.
    """

    def __init__(self, data: _Comparisons, *, order_effect: bool) -> None:
        self.data = data
        m = len(data.names)
        self.size = m + data.ties + order_effect
        # Equal comparisons are one row, so that a million of them take no more than a thousand.
        rows = np.column_stack([data.first, data.second])
        kinds, self.kind = np.unique(rows, axis=0, return_inverse=True)
        self.kind = self.kind.reshape(-1)
        outcomes = 3 if data.ties else 2
        features = np.zeros((len(kinds), outcomes, self.size))
        place = np.arange(len(kinds))
        features[place, 0, kinds[:, 0]] = 1
        features[place, 1, kinds[:, 1]] = 1
        if order_effect:
            features[:, 0, -1] = 1
        if data.ties:
            features[:, 2] = (features[:, 0] + features[:, 1]) / 2
            features[:, 2, m] = 1
        self.features = features
        self.counts = np.zeros((len(kinds), outcomes))
        np.add.at(self.counts, (self.kind, data.outcome), 1.0)

    def fit(self) -> FloatArray:
        """Newton's method; a step that does not raise the likelihood is halved."""
        values = np.zeros(self.size)
        reached = self._likelihood(values)
        for _ in range(_STEPS):
            gradient, information = self._derivatives(values)
            step = np.linalg.solve(information, gradient)
            scale = 1.0
            while (tried := self._likelihood(values + scale * step)) < reached - 1e-12 and scale > 1e-8:
                scale /= 2
            values = values + scale * step
            reached = tried
            if float(np.max(np.abs(scale * step))) < _CLOSE_ENOUGH:
                break
        return values

    def covariance(self, values: FloatArray) -> FloatArray:
        """The sandwich: inverse information, sums of squared scores over clusters, inverse information."""
        data = self.data
        chances = self._chances(values)
        expected = np.einsum("ko,kof->kf", chances, self.features)
        scores = self.features[self.kind, data.outcome] - expected[self.kind]
        totals = np.zeros((data.clusters, self.size))
        np.add.at(totals, data.codes, scores)
        middle = totals.T @ totals * (data.clusters / (data.clusters - 1))
        # The half win and the half loss against the imagined opponent vary as well.
        chance = _logistic(values)
        middle[np.diag_indices(self.size)] += _OPPONENT * ((1 - chance) ** 2 + chance**2)
        inverse = np.linalg.inv(self._derivatives(values)[1])
        return np.asarray(inverse @ middle @ inverse, dtype=np.float64)

    def _chances(self, values: FloatArray) -> FloatArray:
        utilities = self.features @ values
        utilities -= utilities.max(axis=1, keepdims=True)
        weights = np.exp(utilities)
        return np.asarray(weights / weights.sum(axis=1, keepdims=True), dtype=np.float64)

    def _likelihood(self, values: FloatArray) -> float:
        utilities = self.features @ values
        top = utilities.max(axis=1, keepdims=True)
        logarithms = utilities - top - np.log(np.exp(utilities - top).sum(axis=1, keepdims=True))
        opponent = -np.logaddexp(0, -values) - np.logaddexp(0, values)
        return float(np.sum(self.counts * logarithms)) + _OPPONENT * float(opponent.sum())

    def _derivatives(self, values: FloatArray) -> tuple[FloatArray, FloatArray]:
        """The gradient, and the information: the negative second derivatives."""
        chances = self._chances(values)
        met = self.counts.sum(axis=1)
        expected = np.einsum("ko,kof->kf", chances, self.features)
        gradient = np.einsum("ko,kof->f", self.counts, self.features) - met @ expected
        weighted = self.features * (chances * met[:, None])[:, :, None]
        information = np.einsum("kof,kog->fg", weighted, self.features) - (expected * met[:, None]).T @ expected
        chance = _logistic(values)
        gradient += _OPPONENT * (1 - 2 * chance)
        information[np.diag_indices(self.size)] += 2 * _OPPONENT * chance * (1 - chance)
        return gradient, np.asarray(information, dtype=np.float64)


def _logistic(values: FloatArray) -> FloatArray:
    return np.asarray(1 / (1 + np.exp(-values)), dtype=np.float64)
