"""A metric measured on its golden set: agreement with the labels, and each disagreement."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from fairtrial import stats
from fairtrial.base import formatting
from fairtrial.base.frozen import first_is
from fairtrial.reports.calibrate.calibrate import Calibration, Figure, JudgeConfusion, calibrate, figure_of
from fairtrial.reports.calibrate.document import figure_cells
from fairtrial.reports.render.document import Block, Column, Document, Remarks, Table
from fairtrial.reports.render.renderable import Renderable
from fairtrial.scoring.golden import GOLDEN_RULES, GOLDEN_SETS

if TYPE_CHECKING:
    from fairtrial.reports.report import EvalReport
    from fairtrial.trials.result import EvalResult

_RULE = (
    "The cases are written to be hard and are no sample of anybody's traffic: the figures say what kinds of cases the "
    "rule misses, not how often yours are."
)
_JUDGE = (
    "The figures are those of this model with this prompt on cases by the authors of Fairtrial, who have measured no "
    "model with them. Label a random sample of your own trials before you rely on it: fairtrial calibrate RUN."
)


@dataclass(frozen=True, slots=True)
class GoldenMiss:
    """A case on which the metric and the label disagree, or that has no score (`verdict` is None)."""

    id: str
    label: Literal["pass", "fail"]
    verdict: Literal["pass", "fail"] | None
    kind: str
    reason: str
    note: str


@first_is(str)
@dataclass(frozen=True, slots=True, repr=False)
class GoldenCheck(Renderable):
    """What a metric does on its golden set.

    `recall` is the share that it fails of the cases labelled fail, `precision` the share labelled fail of those that it
    fails, `passed_good` the share that it passes of the cases labelled pass.
    """

    json_format: ClassVar[str] = "fairtrial.golden/1"

    name: str
    judge_models: tuple[str, ...]
    cases: int
    scored: int
    level: float
    confusion: JudgeConfusion
    agreement: Figure
    recall: Figure
    precision: Figure
    passed_good: Figure
    kappa: Figure
    disagreements: tuple[GoldenMiss, ...]
    unscored: tuple[GoldenMiss, ...]
    limit: str
    caveat: str

    @property
    def sentence(self) -> str:
        """The agreement in a sentence."""
        right = self.confusion.true_passes + self.confusion.true_fails
        share = f": {formatting.rate(self.agreement.value)}{_ends(self.agreement)}" if self.scored else ""
        return f"{self.name} agrees with {right} of {formatting.count(self.scored, 'label')}{share}."

    def document(self, cases: int) -> Document:
        """Return what is shown."""
        judges = f", judged by {', '.join(self.judge_models)}" if self.judge_models else ""
        blocks: list[Block] = [_verdicts(self.confusion), _figures(self)]
        if self.disagreements:
            blocks.append(_misses("disagreements", self.disagreements))
        if self.unscored:
            blocks.append(_misses("without a score", self.unscored))
        remarks = Remarks((f"limit: {self.limit}.", self.caveat))
        return Document(f"golden set  {self.name}{judges}", (self.sentence,), (*blocks, remarks))

    def __repr__(self) -> str:
        return f"<GoldenCheck of {self.name}: {self.sentence}>"


def golden_check(name: str, report: EvalReport, *, level: float = 0.95) -> GoldenCheck:
    """Compare the report of a suite on a golden set with the labels of the set."""
    results = sorted(report.results, key=lambda result: result.ordinal)
    labels = {result.sample_id: result.sample.metadata["label"] == "pass" for result in results}
    found: Calibration = calibrate(report, labels, level=level, drawn=True)
    flagged = [float(not labels[result.sample_id]) for result in results if result.score and not result.score.passed]
    precision = stats.mean_interval(flagged, bounds=(0.0, 1.0), level=level)
    misses = [_miss(result) for result in results]
    return GoldenCheck(
        name=name,
        judge_models=found.judge_models,
        cases=len(results),
        scored=found.judged,
        level=level,
        confusion=found.confusion or JudgeConfusion(0, 0, 0, 0),
        agreement=found.agreement,
        recall=found.specificity,
        precision=figure_of(precision.mean if flagged else None, precision.interval, len(flagged), precision.reason),
        passed_good=found.sensitivity,
        kappa=found.kappa,
        disagreements=tuple(miss for miss in misses if miss.verdict not in (None, miss.label)),
        unscored=tuple(miss for miss in misses if miss.verdict is None),
        limit=GOLDEN_SETS[name],
        caveat=_RULE if name in GOLDEN_RULES else _JUDGE,
    )


def _miss(result: EvalResult) -> GoldenMiss:
    case, score = result.sample.metadata, result.score
    verdict: Literal["pass", "fail"] | None = None if score is None else "pass" if score.passed else "fail"
    reason = (result.error or "") if score is None else score.explain()
    label: Literal["pass", "fail"] = "pass" if case["label"] == "pass" else "fail"
    return GoldenMiss(result.sample_id, label, verdict, str(case["kind"]), reason, str(case["note"]))


def _verdicts(confusion: JudgeConfusion) -> Table:
    columns = (Column("", "left", name=True), Column("label: pass"), Column("label: fail"))
    rows = (
        ("passed", f"{confusion.true_passes:,}", f"{confusion.false_passes:,}"),
        ("failed", f"{confusion.false_fails:,}", f"{confusion.true_fails:,}"),
    )
    return Table("", columns, rows)


def _ends(figure: Figure) -> str:
    return "" if figure.low is None else f" ({formatting.rate(figure.low)} to {formatting.rate(figure.high)})"


def _figures(check: GoldenCheck) -> Table:
    columns = (
        Column("", "left", name=True, shortest=28),
        Column("value"),
        Column(f"{formatting.level(check.level)} interval"),
        Column("n"),
    )
    return Table("", columns, tuple(_rows(check)))


def _rows(check: GoldenCheck) -> Iterator[tuple[str, str, str, str]]:
    for name, figure, share in (
        ("faults found (recall)", check.recall, True),
        ("right alarms (precision)", check.precision, True),
        ("good cases passed", check.passed_good, True),
        ("Cohen's kappa", check.kappa, False),
    ):
        yield name, *figure_cells(figure, share), f"{figure.n:,}"


def _misses(caption: str, misses: tuple[GoldenMiss, ...]) -> Table:
    columns = (
        Column("case", "left", name=True),
        Column("label", "left"),
        Column("the case", "left", prose=True, lines=3, name=True, heading=False),
        Column("reason given", "left", prose=True, lines=2, name=True, heading=False),
    )
    return Table(caption, columns, tuple((miss.id, miss.label, miss.note, miss.reason or "none") for miss in misses))
