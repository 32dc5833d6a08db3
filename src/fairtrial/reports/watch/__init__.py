"""The watch over daily runs: whether a figure has dropped for good, since when, and what changed then."""
