"""Statistics of arrays: intervals, paired comparison, power, multiplicity, early stopping, agreement, correction.

This package does not depend on runs or samples; of the rest of fairtrial it needs only `wilson` and errors. Its modules
import numpy and scipy: use it only where statistics are computed. A quantity that the data do not determine is
`Undefined` with a reason, or None in a record with a `reason`, but never 0 or NaN. Numbers that are not finite are
refused.
"""

from fairtrial.base.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
