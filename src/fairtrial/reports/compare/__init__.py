"""Comparisons of two runs: pairing, verdicts, the document, and `compare`."""
