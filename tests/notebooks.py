"""A real kernel of notebooks, and what its cells show."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager


@contextmanager
def start_kernel(folder: Path, **options: Any) -> Iterator[BlockingKernelClient]:
    """Run a kernel whose working directory is the folder."""
    manager = KernelManager(transport="ipc", ip=str(folder / "kernel"))
    manager.start_kernel(cwd=str(folder), **options)
    client = manager.blocking_client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=60)
        yield client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def execute(client: BlockingKernelClient, code: str) -> list[dict[str, str]]:
    """Run a cell; return its outputs, each by MIME type. What is printed has the type "stream"."""
    outputs: list[dict[str, str]] = []

    def keep(message: dict[str, Any]) -> None:
        content = message["content"]
        if message["msg_type"] == "stream":
            outputs.append({"stream": content["text"]})
        elif message["msg_type"] in ("display_data", "execute_result", "update_display_data"):
            outputs.append(content["data"])

    reply = client.execute_interactive(code, timeout=60, output_hook=keep)
    assert reply["content"]["status"] == "ok", "\n".join(reply["content"]["traceback"])
    return outputs


def printed(outputs: list[dict[str, str]]) -> str:
    """What a cell printed; fails if it displayed anything else."""
    assert all(list(output) == ["stream"] for output in outputs)
    return "".join(output["stream"] for output in outputs)
