"""Statistics of arrays: intervals, paired comparison, power, multiplicity, early stopping, agreement, correction.

Nothing here knows of runs or samples, and nothing else of the package is imported. numpy and scipy are, so import
this package only where numbers are made. A quantity that the data do not determine is `Undefined` with a reason, or
None in a record whose `reason` says why; it is never 0 and never NaN. Numbers that are not finite are refused.
"""

from fairtrial.stats._arrays import Repeats
from fairtrial.stats.agreement import (
    Confusion,
    RawAgreement,
    cohen_kappa,
    cohen_kappa_table,
    confusion_matrix,
    fleiss_kappa,
    kappa_interval,
    krippendorff_alpha,
    raw_agreement,
)
from fairtrial.stats.association import RankCorrelation, groups_differ, rank_correlation
from fairtrial.stats.corrected import CorrectedMean, prediction_powered_mean, rogan_gladen
from fairtrial.stats.intervals import (
    MeanEstimate,
    beta_uniform,
    clopper_pearson,
    clustered_se,
    mean_interval,
    sem,
    t_interval,
    wilson,
    wilson_effective,
)
from fairtrial.stats.mcnemar import binary_mde, bonett_price, mcnemar_exact, mcnemar_midp
from fairtrial.stats.multiple import benjamini_hochberg, holm
from fairtrial.stats.paired import (
    MarginTest,
    PairedDifference,
    equivalence,
    noninferiority,
    paired_difference,
    paired_se,
)
from fairtrial.stats.power import mde, pairs_to_clear, sample_size, samples_to_clear, samples_to_detect
from fairtrial.stats.repeats import (
    VarianceSplit,
    mean_pass_at_k,
    mean_pass_hat_k,
    pass_at_k,
    pass_hat_k,
    sample_means,
    variance_split,
)
from fairtrial.stats.resampling import SignFlip, bca_interval, signflip, signflip_interval
from fairtrial.stats.results import Interval, Undefined
from fairtrial.stats.sequential import (
    PairsDecision,
    RateDecision,
    betabinom_sequence,
    eprocess_pairs,
    pairs_decision,
    pairs_sequence,
    rate_decision,
)

__all__ = [
    "Interval",
    "Undefined",
    # one rate or mean
    "MeanEstimate",
    "beta_uniform",
    "clopper_pearson",
    "clustered_se",
    "mean_interval",
    "sem",
    "t_interval",
    "wilson",
    "wilson_effective",
    # repeats
    "Repeats",
    "VarianceSplit",
    "mean_pass_at_k",
    "mean_pass_hat_k",
    "pass_at_k",
    "pass_hat_k",
    "sample_means",
    "variance_split",
    # two systems on the same samples
    "MarginTest",
    "PairedDifference",
    "SignFlip",
    "bca_interval",
    "binary_mde",
    "bonett_price",
    "equivalence",
    "mcnemar_exact",
    "mcnemar_midp",
    "noninferiority",
    "paired_difference",
    "paired_se",
    "signflip",
    "signflip_interval",
    # planning
    "mde",
    "sample_size",
    "samples_to_detect",
    "samples_to_clear",
    "pairs_to_clear",
    # many p-values
    "benjamini_hochberg",
    "holm",
    # early stopping
    "PairsDecision",
    "RateDecision",
    "betabinom_sequence",
    "eprocess_pairs",
    "pairs_decision",
    "pairs_sequence",
    "rate_decision",
    # raters and judges
    "Confusion",
    "CorrectedMean",
    "RankCorrelation",
    "RawAgreement",
    "cohen_kappa",
    "cohen_kappa_table",
    "confusion_matrix",
    "fleiss_kappa",
    "groups_differ",
    "kappa_interval",
    "krippendorff_alpha",
    "prediction_powered_mean",
    "rank_correlation",
    "raw_agreement",
    "rogan_gladen",
]
