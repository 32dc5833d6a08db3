"""A search as `fairtrial improve` stores it, without an optimizer: for tests of what reads searches."""

from __future__ import annotations

import random

from fairtrial import AnalysisPlan, Dataset, EvalSuite, Experiment, Sample, TrialContext
from fairtrial.base.codec import digest
from fairtrial.data.splits import Splits
from fairtrial.reports.search import search as stored
from fairtrial.store.notes import SearchNote, write_notes
from fairtrial.store.protocol import RunStore

NAME = "support-prompt-0a1b2c"
TEXTS = ("Answer.", "Answer in one word.", "Answer in one word.\nCheck it twice.", "Refuse.")
PARENTS: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (0,))


def splits() -> Splits[int, str]:
    """Return 200 samples in three splits."""
    return Dataset([Sample(f"s{n:03}", n, "yes") for n in range(200)], name="support").split(seed=2)


BROKEN = splits().train.samples[10].input
"""The input on which the last text ends in an error."""


def answer(number: int, ctx: TrialContext) -> str:
    """Pass more often with a better text; one sample always fails with an error."""
    text = str(ctx.experiment.params["prompt"])
    if (number, text) == (BROKEN, TEXTS[3]):
        raise RuntimeError("the model did not answer")
    rate = {TEXTS[0]: 0.5, TEXTS[1]: 0.6, TEXTS[2]: 0.9, TEXTS[3]: 0.1}[text]
    return "yes" if random.Random(f"{number} {text}").random() < rate else "no"


def right(output: str, expected: str) -> float:
    """Return 1 for the expected answer."""
    return float(output == expected)


async def write_search(store: RunStore, *, ended: bool = True, tested: bool = True) -> str:
    """Store a search with four candidates, the last of which never came to validation; returns its name."""
    parts = splits()
    ids = [digest(text)[:8] for text in TEXTS]
    common = {stored.SEARCH: NAME, stored.PARAMETER: "prompt", stored.OPTIMIZER: "gepa"}

    async def run(
        suite: str, dataset: Dataset[int, str], names: dict[str, int], plan: AnalysisPlan | None = None
    ) -> str:
        experiments = [Experiment(name, {"prompt": TEXTS[place], "style": "terse"}) for name, place in names.items()]
        place = list(names.values())[-1]
        tags = {stored.CANDIDATE: ids[place], stored.PARENTS: " ".join(ids[one] for one in PARENTS[place])}
        made = EvalSuite(f"support{suite}", dataset, answer, right, experiments=experiments)
        report = await made.run(store=store, tags=common | tags, resume="never", plan=plan)
        return report.run_id

    first = await run(stored.SEARCHING, parts.validation, {stored.BASELINE: 0})
    for place in (1, 2, 3):
        samples = parts.train.take(range(place * 3, place * 3 + 3))
        for one in (PARENTS[place][0], place):
            await run(stored.SEARCHING, samples, {ids[one]: one})
        if place < 3:
            await run(stored.SEARCHING, parts.validation, {ids[place]: place})
    if ended:
        store.update_run(first, notes=write_notes(search=SearchNote(ids[2], "the budget of $2.00 is used up")))
    if ended and tested:
        await run(stored.TESTING, parts.test, {stored.BASELINE: 0, stored.WINNER: 2}, plan=AnalysisPlan(looks=True))
    return NAME
