"""All mistakes: those of the first trial, and more."""

from __future__ import annotations

from tests.first_hour.mistakes import commands, datasets, programs, stores, suites

CASES = (*commands.CASES, *stores.CASES, *suites.CASES, *datasets.CASES, *programs.CASES)
