"""What a package can add to Fairtrial: an evaluator, a provider, a store and an importer."""

import csv
import hashlib
from pathlib import Path

from fairtrial import ChatMessage, Dataset, Sample, Score, evaluator, open_store
from fairtrial.models import BaseAdapter, ModelCall, ModelReply
from fairtrial.runs.imported import Import, ImportedRun, ImportedSuite, ImportedTrial
from fairtrial.store import RunStore


@evaluator(inline=True)
def no_shouting(output: str) -> Score:
    """Score 1 unless most letters are capitals: `fairtrial try --evaluator no_shouting`."""
    capitals = sum(letter.isupper() for letter in output)
    return Score(float(2 * capitals <= len(output)), reason=f"{capitals} capitals in {len(output)} characters")


class EchoAdapter(BaseAdapter):
    """A model that repeats its prompt: `fairtrial try --model echo:loud`."""

    def __init__(self, model: str) -> None:
        super().__init__(name="echo", model=model)

    async def _send(self, call: ModelCall) -> ModelReply:
        text = call.messages[-1].text
        return ModelReply(
            ChatMessage("assistant", text.upper() if self.model == "loud" else text), finish_reason="stop"
        )


def open_team_store(url: str) -> RunStore:
    """Open the store of a team: `--store team://search` is the file `stores/search.db`."""
    return open_store(Path("stores") / f"{url.removeprefix('team://')}.db")


class SurveyFiles:
    """Reads answers that people have rated: `fairtrial import ratings.survey.csv`."""

    def recognizes(self, path: Path) -> bool:
        """Return whether the name is that of a survey."""
        return path.name.endswith(".survey.csv")

    def read(self, path: Path) -> Import:
        """Read the columns question, answer and liked (yes or no)."""
        text = path.read_text(encoding="utf-8")
        rows = list(csv.DictReader(text.splitlines()))
        samples: list[Sample[str, None]] = [Sample(f"row-{place}", row["question"]) for place, row in enumerate(rows)]
        dataset = Dataset(samples, name="survey")
        trials = [
            ImportedTrial(number, "scored", score=Score(float(row["liked"] == "yes")), output=row["answer"])
            for number, row in enumerate(rows)
        ]
        content = hashlib.sha256(text.encode()).hexdigest()
        run = ImportedRun(
            path.name, "survey", ("people",), dataset, 1, len(rows), lambda: iter(trials), content, 0.0, 0.0
        )
        return Import((ImportedSuite("survey", path.name, "Survey", dataset, runs=(run,)),))
