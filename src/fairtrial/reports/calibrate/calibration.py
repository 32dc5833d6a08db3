"""Records of a calibration: agreement of a judge with people, and the corrected pass rate."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """A number with its interval and the count behind it. Undefined values are None; `note` says why."""

    value: float | None
    low: float | None
    high: float | None
    n: int
    method: str | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True)
class JudgeConfusion:
    """Counts of the judge's and people's verdicts on labelled trials."""

    true_passes: int
    false_passes: int  # The judge passed what people failed.
    false_fails: int  # The judge failed what people passed.
    true_fails: int

    @property
    def n(self) -> int:
        """The number of trials with both verdicts."""
        return self.true_passes + self.false_passes + self.false_fails + self.true_fails


@dataclass(frozen=True, slots=True)
class Panel:
    """The agreement of several annotators with each other: an upper limit for a judge.

    `trials` have at least two labels. `pairs` is the share of pairs of annotators that agree; `fleiss` needs as many
    labels on each of these trials, `krippendorff` does not.
    """

    annotators: int
    trials: int
    pairs: Figure
    fleiss: Figure
    krippendorff: Figure


@dataclass(frozen=True, slots=True)
class CalibrationRecord:
    """The comparison of a judge with people's labels.

    Attributes:
        run_id: The judged run.
        experiment: Whose outputs were judged.
        metric: The judge's figure that was compared with the labels: "passed", "value" or a metric.
        label: The name of the labels, "" where they were handed in.
        level: The level of all intervals.
        judged: Trials the judge scored.
        labelled: Of these, trials with a label; where annotators disagree, the majority's.
        annotators: The names of the annotators.
        confusion: The judge's verdicts against the people's; None for graded figures.
        agreement: The share of equal verdicts; look at it beside kappa.
        kappa: Agreement beyond chance: Cohen's kappa, or Krippendorff's alpha for graded figures.
        sensitivity: Of what people passed, the share the judge passed.
        specificity: Of what people failed, the share the judge failed.
        judge_rate: The mean of the judge's figures, uncorrected.
        label_rate: The mean of the labels alone.
        corrected: What people would say of all judged trials: post-stratified by the judge's verdict or, for graded
            figures, by regression on the judge's.
        rogan_gladen: The same from sensitivity and specificity; pass/fail only, and never more precise.
        length: The rank correlation of the judge's figure with the output's length.
        length_error: That of the judge's error with the output's length: a bias, where the former may be merit.
        panel: How far several annotators agree; None if no trial has two labels.
        judge_models: The judges' models, as far as they are known.
        same_family: Models under test that are of a judge's family.
        warnings: What may make the figures wrong.
        notes: What else a reader should know.
        drawn: Whether the labelled trials are known to be drawn at random: by a review, because they are all trials, or
            because the caller says so. If not, every figure that rests on labels holds only if they were.
    """

    run_id: str
    experiment: str
    metric: str
    label: str
    level: float
    judged: int
    labelled: int
    annotators: tuple[str, ...]
    confusion: JudgeConfusion | None
    agreement: Figure
    kappa: Figure
    sensitivity: Figure
    specificity: Figure
    judge_rate: Figure
    label_rate: Figure
    corrected: Figure
    rogan_gladen: Figure
    length: Figure
    length_error: Figure
    panel: Panel | None
    judge_models: tuple[str, ...]
    same_family: tuple[str, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    drawn: bool
