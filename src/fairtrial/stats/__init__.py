"""Statistics of arrays: intervals, paired comparison, power, multiplicity, early stopping, agreement, correction.

This package does not depend on runs or samples; of the rest of fairtrial it imports only `wilson`. It imports numpy and
scipy, so import it only where statistics are computed. A quantity that the data do not determine is `Undefined` with a
reason, or None in a record with a `reason`, but never 0 or NaN. Numbers that are not finite are refused.
"""

from fairtrial.stats._arrays import Repeats
from fairtrial.stats.agreement import (
    Confusion,
    RawAgreement,
    cohen_kappa,
    cohen_kappa_table,
    confusion_matrix,
    fleiss_kappa,
    fleiss_kappa_interval,
    kappa_interval,
    krippendorff_alpha,
    krippendorff_alpha_interval,
    raw_agreement,
)
from fairtrial.stats.association import RankCorrelation, groups_differ, rank_correlation
from fairtrial.stats.corrected import CorrectedMean, prediction_powered_mean, rogan_gladen
from fairtrial.stats.differences import paired_rates_interval
from fairtrial.stats.heterogeneity import FEW_GROUP_CLUSTERS, Heterogeneity, heterogeneity
from fairtrial.stats.history import HistoryMean, history_mean
from fairtrial.stats.intervals import (
    FEW_CLUSTERS,
    ClusteredError,
    MeanEstimate,
    QuantileEstimate,
    beta_uniform,
    clopper_pearson,
    clustered_error,
    clustered_se,
    exact_rate_interval,
    mean_interval,
    quantile_interval,
    rate_interval,
    sem,
    t_interval,
    wilson,
    wilson_effective,
)
from fairtrial.stats.labelled import (
    LABELS_TEST,
    JudgedTrials,
    corrected_difference,
    corrected_mean,
    labels_to_detect,
    weighted_groups_differ,
)
from fairtrial.stats.mcnemar import (
    binary_mde,
    bonett_price,
    bonett_price_p,
    mcnemar_exact,
    mcnemar_midp,
    pairs_mde,
)
from fairtrial.stats.multiple import benjamini_hochberg, holm
from fairtrial.stats.paired import (
    MarginTest,
    PairedDifference,
    equivalence,
    noninferiority,
    paired_difference,
    paired_se,
)
from fairtrial.stats.power import (
    detectable_shift,
    mde,
    pairs_to_clear,
    pairs_to_detect,
    sample_size,
    samples_to_clear,
    samples_to_detect,
    samples_to_reach,
    smallest_detectable,
)
from fairtrial.stats.preferences import BradleyTerry, Preference, Strength, bradley_terry
from fairtrial.stats.quantile_differences import geometric_ratio, quantile_difference
from fairtrial.stats.ranking import Ranking, SimultaneousDifferences, SystemScores, rank_systems
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
    BETTING_TEST,
    BettingMartingale,
    PairsDecision,
    RateDecision,
    pairs_decision,
    rate_decision,
    stopped_by_width,
)
from fairtrial.stats.weighted import WeightedMean, weighted_mean

__all__ = [
    "FEW_GROUP_CLUSTERS",
    "Heterogeneity",
    "heterogeneity",
    "Interval",
    "Undefined",
    # one rate or mean
    "FEW_CLUSTERS",
    "ClusteredError",
    "MeanEstimate",
    "QuantileEstimate",
    "beta_uniform",
    "clopper_pearson",
    "clustered_error",
    "clustered_se",
    "exact_rate_interval",
    "mean_interval",
    "quantile_interval",
    "rate_interval",
    "sem",
    "t_interval",
    "wilson",
    "wilson_effective",
    # one mean, and earlier runs of its samples
    "HistoryMean",
    "history_mean",
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
    "bonett_price_p",
    "paired_rates_interval",
    "equivalence",
    "mcnemar_exact",
    "mcnemar_midp",
    "noninferiority",
    "paired_difference",
    "geometric_ratio",
    "quantile_difference",
    "paired_se",
    "signflip",
    "signflip_interval",
    # more than two systems, more than one suite
    "Ranking",
    "SimultaneousDifferences",
    "SystemScores",
    "WeightedMean",
    "rank_systems",
    "weighted_mean",
    # two outputs at a time
    "BradleyTerry",
    "Preference",
    "Strength",
    "bradley_terry",
    # planning
    "detectable_shift",
    "mde",
    "sample_size",
    "samples_to_detect",
    "samples_to_clear",
    "samples_to_reach",
    "pairs_mde",
    "pairs_to_clear",
    "pairs_to_detect",
    "smallest_detectable",
    "labels_to_detect",
    # many p-values
    "benjamini_hochberg",
    "holm",
    # early stopping
    "BETTING_TEST",
    "BettingMartingale",
    "PairsDecision",
    "RateDecision",
    "pairs_decision",
    "rate_decision",
    "stopped_by_width",
    # raters and judges
    "LABELS_TEST",
    "Confusion",
    "CorrectedMean",
    "JudgedTrials",
    "RankCorrelation",
    "RawAgreement",
    "cohen_kappa",
    "cohen_kappa_table",
    "confusion_matrix",
    "corrected_difference",
    "corrected_mean",
    "fleiss_kappa",
    "fleiss_kappa_interval",
    "groups_differ",
    "kappa_interval",
    "krippendorff_alpha",
    "krippendorff_alpha_interval",
    "prediction_powered_mean",
    "rank_correlation",
    "raw_agreement",
    "rogan_gladen",
    "weighted_groups_differ",
]
