"""A plain function as a task: no key, no network.

python examples/function.py
"""

from __future__ import annotations

from fairtrial import Sample, exact_match
from fairtrial.models import MainLoop

CAPITALS = {"France": "Paris", "Japan": "Tokyo"}


def capital_of(country: str) -> str:
    """The system under test."""
    return CAPITALS.get(country, "I don't know")


def main() -> None:
    loop = MainLoop(capital_of)
    for sample in (Sample("fr", "France", "Paris"), Sample("jp", "Japan", "Tokyo"), Sample("it", "Italy", "Rome")):
        response, _ = loop.execute_sync(sample.input)
        verdict = "passed" if exact_match(response.output, sample.expected).passed else "failed"
        print(f"{sample.input}: {response.output} {verdict}")


if __name__ == "__main__":
    main()
