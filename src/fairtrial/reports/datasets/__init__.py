"""Datasets as runs know them: samples chosen from failures, and versions."""
