"""Compute the figures of stored runs: estimates, comparisons, gates, calibrations.

Everything here takes an `ExperimentSource` or columns and returns records. It knows neither reports nor how anything is
shown: `fairtrial.reports.render` does that, and `fairtrial.reports` is what people hold.
"""
