"""A training loop of one's own: its buffer and its log."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import os
import random
import sys
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Protocol, Self

from fairtrial.base.codec import canonical
from fairtrial.base.system import replace_file
from fairtrial.data.dataset import Dataset
from fairtrial.data.sample import Sample
from fairtrial.errors import CodecError, ConfigurationError
from fairtrial.rl.advantages import AdvantageKind, Convention, check_kind
from fairtrial.rl.groups import Group, Rollout, rollout
from fairtrial.scoring.evaluator import Evaluator, Scorer
from fairtrial.trials.config import EvalConfig


class MetricSink(Protocol):
    """Whatever takes the numbers of a training run: `MetricLog`, or an object of yours with this method."""

    def log_metric(self, name: str, value: float, *, step: int) -> None:
        """Take one number."""
        ...


class MetricLog:
    """Writes every number of a training run to its targets.

    Args:
        *targets: Paths of JSONL files, to which lines `{"step": 3, "name": "reward", "value": 0.5}` are appended; open
            text files, such as `sys.stdout`; and functions `(name, value, step)`.
    """

    def __init__(self, *targets: Path | str | IO[str] | Callable[[str, float, int], object]) -> None:
        self._opened: list[IO[str]] = []
        self._write: list[Callable[[str, float, int], object]] = []
        for target in targets:
            if isinstance(target, str | Path):
                file = open(target, "a", encoding="utf-8")  # noqa: SIM115 - closed by `close`
                self._opened.append(file)
                self._write.append(_lines(file))
            elif callable(target):
                self._write.append(target)
            elif hasattr(target, "write"):
                self._write.append(_texts(target) if target in (sys.stdout, sys.stderr) else _lines(target))
            else:
                raise ConfigurationError(
                    f"a target of MetricLog must be a path, an open file or a function (got {target!r:.80})"
                )

    def log_metric(self, name: str, value: float, *, step: int) -> None:
        """Write one number."""
        for write in self._write:
            write(name, value, step)

    def close(self) -> None:
        """Close the files that were opened here."""
        for file in self._opened:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def _lines(file: IO[str]) -> Callable[[str, float, int], object]:
    def write(name: str, value: float, step: int) -> None:
        # JSON has no infinity and no NaN, and a loss may become one.
        shown = value if math.isfinite(value) else str(value)
        file.write(json.dumps({"step": step, "name": name, "value": shown}) + "\n")
        file.flush()

    return write


def _texts(file: IO[str]) -> Callable[[str, float, int], object]:
    def write(name: str, value: float, step: int) -> None:
        file.write(f"step {step}  {name} {value:g}\n")

    return write


_FORMAT = "fairtrial.data_buffer/1"


class DataBuffer[T]:
    """Gives out items in batches, epoch after epoch.

    The order of an epoch depends only on the seed and the number of the epoch, so the state is a few numbers.

    Args:
        items: Samples, or prompts of any kind that can be stored as JSON.
        shuffle: Give out the items of every epoch in another order.
        seed: The seed of the orders.
        epochs: How often each item is given out; None for no end.
    """

    def __init__(
        self, items: Dataset[Any, Any] | Iterable[T], *, shuffle: bool = True, seed: int = 0, epochs: int | None = None
    ) -> None:
        self._items: Sequence[Any] = items if isinstance(items, Dataset) else tuple(items)
        if not len(self._items):
            raise ConfigurationError("a DataBuffer must have at least one item (got none)")
        if epochs is not None and epochs < 1:
            raise ConfigurationError(f"epochs must be at least 1, or None for no end (got {epochs})")
        self._shuffle = shuffle
        self._seed = seed
        self._epochs = epochs
        self._epoch = 0
        self._position = 0
        self._returned: deque[int] = deque()
        self._order: Sequence[int] = self._order_of(0)
        self._places: dict[int, int] | None = None

    @property
    def epoch(self) -> int:
        """The number of complete epochs that were given out."""
        return self._epoch + (self._position == len(self._order))

    def __len__(self) -> int:
        """The number of items in an epoch."""
        return len(self._items)

    def get_prompts(self, count: int) -> list[T]:
        """Return the next items: those that were given back first, then those of the epoch, then of the next one.

        Returns fewer, and at last none, when all epochs are over.
        """
        if count < 1:
            raise ConfigurationError(f"the number of prompts must be at least 1 (got {count})")
        taken: list[int] = []
        while len(taken) < count:
            if self._returned:
                taken.append(self._returned.popleft())
            elif self._position < len(self._order):
                taken.append(self._order[self._position])
                self._position += 1
            elif self._epochs is not None and self._epoch + 1 >= self._epochs:
                break
            else:
                self._start_epoch(self._epoch + 1)
        if self._position == len(self._order) and (self._epochs is None or self._epoch + 1 < self._epochs):
            self._start_epoch(self._epoch + 1)
        return [self._items[place] for place in taken]

    def give_back(self, items: Iterable[T]) -> None:
        """Take back items whose rollouts were aborted: they are the next to be given out, in this order."""
        places = [self._place(item) for item in items]
        self._returned.extendleft(reversed(places))

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {
            "format": _FORMAT,
            "items": self._identity(),
            "seed": self._seed,
            "shuffle": self._shuffle,
            "epoch": self._epoch,
            "position": self._position,
            "returned": list(self._returned),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where the state was taken. It must be of a buffer with the same items, seed and shuffling."""
        if state.get("format") != _FORMAT:
            raise ConfigurationError(f"the state must be one of a DataBuffer (got format {state.get('format')!r})")
        own = self.state_dict()
        for name in ("items", "seed", "shuffle"):
            if state.get(name) != own[name]:
                raise ConfigurationError(
                    f"the state must be of a buffer with the same {name} (got {state.get(name)!r} for {own[name]!r})\n"
                    "make the DataBuffer with the arguments it was saved with, or start without the state"
                )
        self._start_epoch(int(state["epoch"]))
        self._position = int(state["position"])
        self._returned = deque(int(place) for place in state["returned"])

    def save(self, path: Path | str) -> None:
        """Write the state to a file, which is replaced only when it is complete."""
        target = Path(path)
        aside = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            aside.write_text(json.dumps(self.state_dict()), encoding="utf-8")
            replace_file(aside, target)
        finally:
            aside.unlink(missing_ok=True)

    def load(self, path: Path | str) -> None:
        """Continue with the state of a file that `save` wrote."""
        try:
            state = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigurationError(f"{path} must be a file that DataBuffer.save wrote (got {error})") from None
        self.load_state_dict(state if isinstance(state, dict) else {})

    def _start_epoch(self, number: int) -> None:
        self._epoch, self._position = number, 0
        self._order = self._order_of(number)

    def _order_of(self, epoch: int) -> Sequence[int]:
        order = list(range(len(self._items)))
        if self._shuffle:
            random.Random(f"{self._seed}/{epoch}").shuffle(order)  # noqa: S311 - an order, not a secret
        return order

    def _place(self, item: T) -> int:
        if self._places is None:
            self._places = {}
            for place, known in enumerate(self._items):
                self._places.setdefault(_digest(known), place)
        found = self._places.get(_digest(item))
        if found is None:
            raise ConfigurationError(f"only items of the buffer can be given back (got {item!r:.80})")
        return found

    def _identity(self) -> str:
        if isinstance(self._items, Dataset):
            return f"{self._items.fingerprint}/{self._items.order}"
        whole = hashlib.sha256(b"".join(_digest(item).to_bytes(16) for item in self._items))
        return whole.hexdigest()[:32]

    def __repr__(self) -> str:
        return f"<DataBuffer: {len(self):,} items, epoch {self._epoch}, {self._position:,} given out>"


def _digest(item: Any) -> int:
    content = ["sample", item.id] if isinstance(item, Sample) else ["item", item]
    try:
        return int.from_bytes(hashlib.blake2b(canonical(content), digest_size=16).digest())
    except CodecError as error:
        raise ConfigurationError(f"items of a DataBuffer must be JSON values or samples: {error}") from None


class TrainingBackend(Protocol):
    """What owns the model and the optimizer."""

    def train_step(self, rollouts: Sequence[Rollout], advantages: Sequence[float]) -> float | Awaitable[float]:
        """Update the weights with scored rollouts and their advantages; returns the loss. May be async."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """The settings of a training loop.

    Attributes:
        num_steps: The number of steps; fewer if the buffer has no more prompts.
        batch_size: The number of prompts in a step.
        group_size: The number of rollouts of each prompt.
        advantage: The formula of the advantages; see `advantages`.
        convention: The trainer whose numbers are reproduced.
        max_returns: How often a prompt is given back to the buffer because none of its rollouts was scored.
        seed: The seed of step 0; each step has another one.
        run: Settings of the runs that execute the rollouts, such as `max_concurrent`.
    """

    num_steps: int
    batch_size: int = 8
    group_size: int = 8
    advantage: AdvantageKind = "grpo"
    convention: Convention = "trl"
    max_returns: int = 1
    seed: int = 0
    run: EvalConfig = EvalConfig()  # noqa: RUF009 - it is frozen

    def __post_init__(self) -> None:
        check_kind(self.advantage, self.convention)
        for name, least in (("num_steps", 1), ("batch_size", 1), ("group_size", 1), ("max_returns", 0), ("seed", 0)):
            if getattr(self, name) < least:
                raise ConfigurationError(f"TrainConfig.{name} must be at least {least} (got {getattr(self, name)})")


async def train(
    backend: TrainingBackend,
    buffer: DataBuffer[Any],
    task: Any,
    evaluator: Evaluator | Scorer,
    config: TrainConfig,
    *,
    log: MetricSink | None = None,
    start: int = 0,
) -> list[dict[str, Any]]:
    """Train: take prompts, execute and score rollouts, compute advantages, call `backend.train_step`.

    Only scored rollouts reach the backend. A prompt without any scored rollout is given back to the buffer, at most
    `max_returns` times; if a step is cancelled or fails, all its prompts are given back, so that the state of the
    buffer can be saved and the training continued with `start`.

    Args:
        backend: An object with `train_step(rollouts, advantages)`, sync or async.
        buffer: The prompts: samples, or values that become the input `{"prompt": value}` of a sample.
        task: The task, which calls the model that the backend trains.
        evaluator: Scores the rollouts.
        config: The settings.
        log: Receives the reward and every metric of every rollout, the mean reward and the loss.
        start: The number of the first step.

    Returns:
        One dict for each step: `step`, `loss` (None if no rollout was scored), `mean_reward`, `rollouts`, `scored`,
        and `mixed_groups`, the number of groups whose rewards differ.
    """
    sink = MetricLog() if log is None else log
    returns: Counter[str] = Counter()
    history: list[dict[str, Any]] = []
    for step in range(start, config.num_steps):
        prompts = buffer.get_prompts(config.batch_size)
        if not prompts:
            break
        try:
            samples = _samples(prompts, step)
            found = await rollout(
                samples,
                task,
                evaluator,
                group_size=config.group_size,
                policy=f"step-{step}",
                advantage=config.advantage,
                convention=config.convention,
                seed=(config.seed + step * 1_000_003) % (1 << 31),
                config=config.run,
            )
            loss = await _step(backend, [one for group in found for one in group.scored])
        except BaseException:
            buffer.give_back(prompts)
            raise
        _return_unscored(buffer, prompts, samples, found, returns, config.max_returns)
        history.append(_logged(sink, step, found, loss))
    return history


def _samples(prompts: Sequence[Any], step: int) -> list[Sample[Any, Any]]:
    """Return the prompts as samples with distinct ids: a batch may reach from one epoch into the next."""
    seen: Counter[str] = Counter()
    distinct: list[Sample[Any, Any]] = []
    for place, prompt in enumerate(prompts):
        sample = prompt if isinstance(prompt, Sample) else Sample(f"step_{step}_{place}", {"prompt": prompt})
        seen[sample.id] += 1
        again = seen[sample.id]
        distinct.append(sample if again == 1 else replace(sample, id=f"{sample.id}#{again}"))
    return distinct


async def _step(backend: TrainingBackend, scored: Sequence[Rollout]) -> float | None:
    if not scored:
        return None
    loss = backend.train_step(scored, [one.advantage or 0.0 for one in scored])
    return float(await loss if inspect.isawaitable(loss) else loss)


def _return_unscored(
    buffer: DataBuffer[Any],
    prompts: Sequence[Any],
    samples: Sequence[Sample[Any, Any]],
    found: Sequence[Group],
    returns: Counter[str],
    most: int,
) -> None:
    scored = {group.sample_id for group in found if group.scored}
    aborted: list[Any] = []
    for prompt, sample in zip(prompts, samples, strict=True):
        name = sample.id if isinstance(prompt, Sample) else repr(prompt)
        if sample.id not in scored and returns[name] < most:
            returns[name] += 1
            aborted.append(prompt)
    buffer.give_back(aborted)


def _logged(sink: MetricSink, step: int, found: Sequence[Group], loss: float | None) -> dict[str, Any]:
    rollouts = [one for group in found for one in group.rollouts]
    rewards: list[float] = []
    for one in rollouts:
        if one.reward is None:
            continue
        rewards.append(one.reward)
        sink.log_metric("reward", one.reward, step=step)
        for name, value in one.metrics.items():
            sink.log_metric(f"score/{name}", value, step=step)
    mean = sum(rewards) / len(rewards) if rewards else None
    for name, number in (("loss", loss), ("mean_reward", mean)):
        if number is not None:
            sink.log_metric(name, number, step=step)
    return {
        "step": step,
        "loss": loss,
        "mean_reward": mean,
        "rollouts": len(rollouts),
        "scored": len(rewards),
        "mixed_groups": sum(group.signal == "mixed" for group in found),
    }
