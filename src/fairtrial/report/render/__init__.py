"""Reports, comparisons and gates as people and programs read them.

`of_report`, `of_comparison` and `of_gate` put into words what is to be said; `terminal`, `markdown` and `html` show it;
`record` is the same for programs, `junit` for CI systems, `plots` the drawings, `words` numbers as people read them.
"""

from fairtrial.report.render.words import cost, duration, money, number, rate

__all__ = ["cost", "duration", "money", "number", "rate"]
