"""Agents that exist already, evaluated as they are: a function with its own client, and a service behind HTTP.

    python examples/existing_agent.py

Both record the tools they used and the tokens they took, so that evaluators can look at them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.request import Request, urlopen

from openai import OpenAI

from fairtrial import (
    Dataset,
    EvalReport,
    PromptExecuted,
    TokenUsage,
    ToolInvoked,
    TrialContext,
    all_of,
    current_trial,
    evaluate_sync,
    exact_match,
    tool_called,
)
from fairtrial.integrations.model_server import ModelServer, Rule
from fairtrial.integrations.tracing import record_openai
from fairtrial.scoring import token_usage_under

QUESTIONS = Dataset.of({"6 * 7": "42", "2 + 2": "4"}, name="sums")


def my_agent(question: str, client: OpenAI) -> str:
    """An agent written before Fairtrial came; one line was added, for a tool that no model asked for."""
    answer = client.chat.completions.create(model="test-model", messages=[{"role": "user", "content": question}])
    current_trial().session.record(ToolInvoked("calculator", {"expression": question}, success=True))
    return answer.choices[0].message.content or ""


def over_http(question: str, ctx: TrialContext, *, url: str) -> str:
    """A service that reports what it did beside its answer."""
    request = Request(url, json.dumps({"question": question}).encode(), {"content-type": "application/json"})
    with urlopen(request, timeout=30) as response:
        said = json.load(response)
    for call in said["tools"]:
        ctx.session.record(ToolInvoked(call["name"], call["arguments"], success=True))
    ctx.session.record(PromptExecuted("service", usage=TokenUsage(**said["usage"])))
    return str(said["answer"])


class Service(BaseHTTPRequestHandler):
    """Stands for somebody's agent behind HTTP."""

    def do_POST(self) -> None:
        question = json.loads(self.rfile.read(int(self.headers["content-length"])))["question"]
        answer = {
            "answer": {"6 * 7": "42"}.get(question, "no idea"),
            "tools": [{"name": "calculator", "arguments": {"expression": question}}],
            "usage": {"input_tokens": 12, "output_tokens": 3},
        }
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextmanager
def service() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Service) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def main() -> tuple[EvalReport, EvalReport]:
    evaluator = all_of(exact_match, tool_called("calculator"), token_usage_under(100))
    rules = [Rule(r"6 \* 7", "42"), Rule(r"2 \+ 2", "4")]
    with (
        ModelServer(rules) as models,
        OpenAI(base_url=models.base_url + "/v1", api_key="none") as client,
        service() as url,
    ):
        record_openai(client)

        def function(question: str) -> str:
            return my_agent(question, client)

        def endpoint(question: str, ctx: TrialContext) -> str:
            return over_http(question, ctx, url=url)

        return evaluate_sync(QUESTIONS, function, evaluator), evaluate_sync(QUESTIONS, endpoint, evaluator)


if __name__ == "__main__":
    for report in main():
        print(report)
