"""Calibrations: how well a judge agrees with people, and which trials people should label."""
