"""Compare judges with people's labels."""

from __future__ import annotations

from dataclasses import dataclass

from fairtrial.base.frozen import first_is
from fairtrial.reports.calibrate.numbers import CalibrationRecord, calibrate_source
from fairtrial.reports.figures.labels import Labels
from fairtrial.reports.figures.metrics import PASSED
from fairtrial.reports.renderable import RenderableRecord
from fairtrial.reports.report import EvalReport, ExperimentReport, source_of


@first_is(str)
@dataclass(frozen=True, slots=True, repr=False)
class Calibration(CalibrationRecord, RenderableRecord):
    """The comparison of a judge with people's labels; `CalibrationRecord` describes the attributes."""

    def __repr__(self) -> str:
        return f"<Calibration of {self.metric}, experiment {self.experiment} of {self.run_id}>"


def calibrate(
    judged: EvalReport | ExperimentReport,
    labels: Labels | None = None,
    *,
    metric: str = PASSED,
    name: str | None = None,
    level: float = 0.95,
    by_verdict: bool = False,
    drawn: bool = False,
) -> Calibration:
    """Compare a judge's scores with people's labels of the same trials, and correct the pass rate.

    The labelled trials must be a random sample of the judged ones, or of those with each verdict (`by_verdict`), or
    have weights (`Label.weight`).

    Args:
        judged: The judged run, or one of its experiments: `report["terse"]`.
        labels: Sample ids (or, with repeats, trial keys) with what people say: True or False, a number, "pass" or
            "fail", or one of the judge's ratings. Labels of the run's store are read unless they are given.
        metric: Which of the judge's figures is meant: "passed", "value", or a metric by name.
        name: Which labels of the store are meant, if they have several names.
        level: The confidence of all intervals.
        by_verdict: Trials were drawn at random among those that the judge passed, and among those that it failed, in
            whatever numbers.
        drawn: The labelled trials were drawn at random. That is known of the labels of a review; of others, what people
            would say is conditional on it unless it is declared.
    """
    source = source_of(judged, 'name one, as in calibrate(report["terse"])')
    return Calibration.of(
        calibrate_source(source, labels, metric=metric, name=name, level=level, by_verdict=by_verdict, drawn=drawn)
    )
