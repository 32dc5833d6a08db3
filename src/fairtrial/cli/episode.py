"""Runs one sample against the model of a trainer: `python -m fairtrial.cli.episode`.

Trainers start it as a process of its own, so it is no command of `fairtrial`.
"""

from __future__ import annotations

import difflib
import os
from typing import TYPE_CHECKING, Annotated

import typer

from fairtrial.cli import main, options
from fairtrial.cli.user_errors import ExitCode, UserError

if TYPE_CHECKING:
    from fairtrial.rl import EpisodeResult


def episode(
    suite: Annotated[str, typer.Argument(metavar="SUITE", help="Suite with the agent: file.py[:name].")],
    sample: Annotated[str, typer.Option("--sample", metavar="ID", help="Sample to run.", show_default=False)],
    base_url: Annotated[
        str | None,
        typer.Option(
            "--base-url",
            metavar="URL",
            help="Address of the model, up to /v1 (default: AGL_OPENAI_BASE_URL or OPENAI_BASE_URL).",
        ),
    ] = None,
    model: Annotated[str, typer.Option("--model", metavar="NAME", help="Name of the model in requests.")] = "policy",
    json: options.Json = False,
) -> int:
    """Score one sample with the model of a trainer.

    The agent of the suite calls the model at the given address instead of its own. The key is AGL_KEY or
    OPENAI_API_KEY. If AGL_EVENT_URL is set, as Agent Lightning does, the reward is sent there. An episode that could
    not be scored has no reward: nothing is sent, and the exit code is 4.

    \b
    Examples:
      python -m fairtrial.cli.episode evals.py --sample T-17 --base-url http://127.0.0.1:8000/v1
      python -m fairtrial.cli.episode evals.py:support --sample T-17 --json
    """
    from fairtrial.base.sync_bridge import call_sync
    from fairtrial.cli.adhoc import load
    from fairtrial.cli.screen import print_json
    from fairtrial.rl import episode as episode_of

    options.start_logging()
    address = base_url or os.environ.get("AGL_OPENAI_BASE_URL") or os.environ.get("OPENAI_BASE_URL")
    if not address:
        raise UserError("no address of the model", "pass --base-url URL, or set OPENAI_BASE_URL")
    key = os.environ.get("AGL_KEY") or os.environ.get("OPENAI_API_KEY") or "none"
    loaded = load(suite)
    found = next((one for one in loaded.dataset if one.id == sample), None)
    if found is None:
        near = difflib.get_close_matches(sample, [one.id for one in loaded.dataset], 1)
        remedy = f"did you mean {near[0]!r}?" if near else ""
        raise UserError(f"suite {loaded.name!r} has no sample {sample!r}", remedy)
    result = call_sync(lambda: episode_of(loaded, model=model).play(found, base_url=address, api_key=key))
    event_url = os.environ.get("AGL_EVENT_URL")
    if event_url and result.reward is not None:
        _send_reward(event_url, key, result.reward)
    if json:
        print_json({"format": "fairtrial.episode/1", **result.to_json()})
    else:
        _print(result)
    return int(ExitCode.OK if result.reward is not None else ExitCode.ERRORED)


def _print(result: EpisodeResult) -> None:
    if result.reward is None:
        typer.echo(f"{result.sample_id}  not scored ({result.status}): {result.error or 'the evaluator failed'}")
        return
    metrics = "  ".join(f"{name} {value:g}" for name, value in result.metrics.items())
    typer.echo(f"{result.sample_id}  reward {result.reward:g}  {result.status}" + (f"  {metrics}" if metrics else ""))


def _send_reward(url: str, key: str, reward: float) -> None:
    """Send a reward to the gateway of Agent Lightning."""
    from urllib.error import URLError
    from urllib.request import Request, urlopen

    from fairtrial.base.codec import dumps

    if not url.startswith(("http://", "https://")):
        raise UserError(f"AGL_EVENT_URL must be an http address (got {url!r})")
    body = dumps({"event_type": "reward", "data": {"value": reward, "source": "fairtrial"}}).encode()
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    request = Request(url, body, headers, method="POST")  # noqa: S310 - checked above
    try:
        with urlopen(request, timeout=30):  # noqa: S310 - checked above
            pass
    except (URLError, OSError) as error:
        raise UserError(f"the reward could not be sent to {url}: {error}", "check AGL_EVENT_URL") from None


if __name__ == "__main__":
    main(episode)
