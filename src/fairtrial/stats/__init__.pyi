from fairtrial.stats._arrays import Interval as Interval, Repeats as Repeats, Undefined as Undefined
from fairtrial.stats.agreement import (
    Confusion as Confusion,
    CorrectedMean as CorrectedMean,
    cohen_kappa as cohen_kappa,
    cohen_kappa_table as cohen_kappa_table,
    confusion_matrix as confusion_matrix,
    fleiss_kappa as fleiss_kappa,
    fleiss_kappa_interval as fleiss_kappa_interval,
    kappa_interval as kappa_interval,
    krippendorff_alpha as krippendorff_alpha,
    krippendorff_alpha_interval as krippendorff_alpha_interval,
    prediction_powered_mean as prediction_powered_mean,
    rogan_gladen as rogan_gladen,
)
from fairtrial.stats.agreement import (
    RankCorrelation as RankCorrelation,
    groups_differ as groups_differ,
    rank_correlation as rank_correlation,
)
from fairtrial.stats.differences import (
    FEW_GROUP_CLUSTERS as FEW_GROUP_CLUSTERS,
    Heterogeneity as Heterogeneity,
    heterogeneity as heterogeneity,
    paired_rates_interval as paired_rates_interval,
)
from fairtrial.stats.history import HistoryMean as HistoryMean, history_mean as history_mean
from fairtrial.stats.intervals import (
    FEW_CLUSTERS as FEW_CLUSTERS,
    ClusteredError as ClusteredError,
    MeanEstimate as MeanEstimate,
    QuantileEstimate as QuantileEstimate,
    beta_uniform as beta_uniform,
    clopper_pearson as clopper_pearson,
    clustered_error as clustered_error,
    clustered_se as clustered_se,
    exact_rate_interval as exact_rate_interval,
    mean_interval as mean_interval,
    quantile_interval as quantile_interval,
    rate_interval as rate_interval,
    sem as sem,
    t_interval as t_interval,
    wilson as wilson,
    wilson_effective as wilson_effective,
)
from fairtrial.stats.labelled import (
    LABELS_TEST as LABELS_TEST,
    JudgedTrials as JudgedTrials,
    corrected_difference as corrected_difference,
    corrected_mean as corrected_mean,
    labels_to_detect as labels_to_detect,
    weighted_groups_differ as weighted_groups_differ,
)
from fairtrial.stats.paired import (
    MarginTest as MarginTest,
    PairedDifference as PairedDifference,
    equivalence as equivalence,
    noninferiority as noninferiority,
    paired_difference as paired_difference,
    paired_se as paired_se,
)
from fairtrial.stats.power import (
    detectable_shift as detectable_shift,
    mde as mde,
    pairs_to_clear as pairs_to_clear,
    pairs_to_detect as pairs_to_detect,
    sample_size as sample_size,
    samples_to_detect as samples_to_detect,
    samples_to_reach as samples_to_reach,
    smallest_detectable as smallest_detectable,
)
from fairtrial.stats.preferences import (
    BradleyTerry as BradleyTerry,
    Preference as Preference,
    Strength as Strength,
    bradley_terry as bradley_terry,
)
from fairtrial.stats.quantile_differences import (
    geometric_ratio as geometric_ratio,
    quantile_difference as quantile_difference,
)
from fairtrial.stats.ranking import (
    Ranking as Ranking,
    SimultaneousDifferences as SimultaneousDifferences,
    SystemScores as SystemScores,
    WeightedMean as WeightedMean,
    rank_systems as rank_systems,
    weighted_mean as weighted_mean,
)
from fairtrial.stats.repeats import (
    VarianceSplit as VarianceSplit,
    mean_pass_at_k as mean_pass_at_k,
    mean_pass_hat_k as mean_pass_hat_k,
    pass_at_k as pass_at_k,
    pass_hat_k as pass_hat_k,
    sample_means as sample_means,
    variance_split as variance_split,
)
from fairtrial.stats.resampling import (
    SignFlip as SignFlip,
    bca_interval as bca_interval,
    binary_mde as binary_mde,
    bonett_price as bonett_price,
    bonett_price_p as bonett_price_p,
    mcnemar_exact as mcnemar_exact,
    mcnemar_midp as mcnemar_midp,
    pairs_mde as pairs_mde,
    signflip as signflip,
    signflip_interval as signflip_interval,
)
from fairtrial.stats.sequential import (
    BETTING_TEST as BETTING_TEST,
    BettingMartingale as BettingMartingale,
    PairsDecision as PairsDecision,
    RateDecision as RateDecision,
    benjamini_hochberg as benjamini_hochberg,
    holm as holm,
    pairs_decision as pairs_decision,
    rate_decision as rate_decision,
    stopped_by_width as stopped_by_width,
)
from fairtrial.stats.weighted import unequal_chances_mean as unequal_chances_mean

__all__: list[str]
