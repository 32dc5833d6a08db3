"""Submits the trials of a run to a fleet and collects their results."""
