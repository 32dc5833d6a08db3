"""The model server as OpenAI's hosted Evals, seen through OpenAI's own client."""

from __future__ import annotations

import openai
import pytest

from fairtrial.integrations.model_server import FaultRule, HostedEvals, ModelServer, RateLimited, spawn_model_server
from tests.integrations.importers.project import small_project


def client_of(base_url: str, **options: int) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{base_url}/v1", api_key="sk-test", max_retries=options.get("max_retries", 0))


def test_lists_come_in_pages_in_both_orders() -> None:
    project = small_project(page_size=4)
    ids = [item["id"] for item in project.items["evalrun_a"]]
    with ModelServer(evals=project) as server:
        client = client_of(server.base_url)
        assert [one.id for one in client.evals.list()] == ["eval_capitals"]
        assert [run.id for run in client.evals.runs.list("eval_capitals")] == ["evalrun_a", "evalrun_b"]
        items = client.evals.runs.output_items
        page = items.list("evalrun_a", eval_id="eval_capitals", limit=3)
        assert ([item.id for item in page.data], page.has_more) == (ids[:3], True)
        assert [item.id for item in page] == ids
        assert [item.id for item in items.list("evalrun_a", eval_id="eval_capitals", order="desc")] == ids[::-1]
        assert len(items.list("evalrun_a", eval_id="eval_capitals", limit=100).data) == 4
        assert server.stats().by_status == {200: 1 + 1 + 4 + 3 + 1}


def test_what_is_not_there_is_404_and_an_unknown_cursor_400() -> None:
    with ModelServer(evals=HostedEvals(files={"file-1": "one\n"})) as server:
        client = client_of(server.base_url)
        assert client.files.content("file-1").content == b"one\n"
        with pytest.raises(openai.NotFoundError, match="file file-2"):
            client.files.content("file-2")
        with pytest.raises(openai.NotFoundError, match="eval x"):
            client.evals.runs.list("x")
        with pytest.raises(openai.NotFoundError, match="run y"):
            client.evals.runs.output_items.list("y", eval_id="x")
        with pytest.raises(openai.BadRequestError, match="no object 'z'"):
            client.evals.list(after="z")
    with ModelServer() as server, pytest.raises(openai.NotFoundError):
        client_of(server.base_url).evals.list()


def test_limits_and_faults_apply_and_a_project_is_sent_to_another_process() -> None:
    fault = FaultRule(RateLimited(0.01), when="/output_items", attempts=(1,))
    with spawn_model_server(evals=small_project(), faults=fault) as server:
        client = client_of(server.base_url, max_retries=1)
        assert len(list(client.evals.runs.output_items.list("evalrun_a", eval_id="eval_capitals"))) == 10
        assert server.stats().by_fault == {"rate_limited": 3}
