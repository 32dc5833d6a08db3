"""Everything that a finished run shows: reports, comparisons, gates, leaderboards, plans and calibrations."""

from fairtrial.base.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
