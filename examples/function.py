"""A plain function as a task: no key, no network.

python examples/function.py
"""

from __future__ import annotations

from fairtrial import Dataset, EvalReport, evaluate_sync, exact_match

CAPITALS = {"France": "Paris", "Japan": "Tokyo"}


def capital_of(country: str) -> str:
    """The system under test."""
    return CAPITALS.get(country, "I don't know")


def main() -> EvalReport:
    capitals = Dataset.of({"France": "Paris", "Japan": "Tokyo", "Italy": "Rome"}, name="capitals")
    return evaluate_sync(capitals, capital_of, exact_match)


if __name__ == "__main__":
    print(main())
