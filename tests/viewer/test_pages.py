"""The pages over HTTP: what they show, and what they answer when something is missing."""

from __future__ import annotations

import csv
import html
import http.client
import io
import json
import re
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fairtrial import ChatMessage, EvalReport, EvalResult, Sample, Score, TokenUsage, TrialKey, compare, open_store
from fairtrial.models import ScriptedAdapter, conversation_task, simulated_user
from fairtrial.viewer.access import HEADERS
from fairtrial.viewer.app import routes
from fairtrial.viewer.pages.context import Viewer
from fairtrial.viewer.working import Workbench
from tests.models.test_user_check import END, agent, solved, suite_of
from tests.viewer.conftest import HOSTILE, Viewed, add_support_runs, open_session, record, segment, start_server, trial

RUN = "support@2"
FORM = "application/x-www-form-urlencoded"


def plain(text: str) -> str:
    """The text of a page without its tags."""
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", text)).split())


def samples_of(text: str) -> list[str]:
    return re.findall(r'<a class="main" href="[^"]+">\s*(q\d\d)', text)


@pytest.mark.proves("R122")
def test_every_route_is_behind_the_guard(viewed: Viewed) -> None:
    viewer = Viewer(viewed.store, Workbench("", read_only=True), viewed.server.access, store_name="", read_only=False)
    reviewer = open_session(viewed.server, "rev")
    paths, open_to_reviewers = [], []
    for route in routes(viewer):
        filled = re.sub(r"\{repeat:int\}", "0", route.path)
        filled = re.sub(r"\{(\w+)\}", "x", filled).lstrip("/")
        method = "POST" if "POST" in (route.methods or ()) else "GET"
        paths.append((method, filled))
        if filled == "login":
            continue
        headers = {"Origin": f"http://127.0.0.1:{viewed.server.port}", "Content_Length": "0"}
        # Files of the package are for the page where people sign in.
        refused = 404 if filled.startswith("static/") else 401
        assert viewed.get(filled, method=method, Cookie="", **headers).status == refused, filled
        assert viewed.get(filled, method=method, host="evil.example", **headers).status == 421, filled
        assert viewed.get(filled, method=method, Sec_Fetch_Site="cross-site", **headers).status == 403, filled
        if method == "POST":
            assert viewed.get(filled, method=method, Origin="http://evil.example", Content_Length="0").status == 403
            assert viewed.get(filled, method=method, Content_Length="0").status == 403, filled
        if method == "POST" and filled != "logout":
            forged = viewed.get(
                filled, method=method, body="form_secret=guessed", Content_Type=FORM, Origin=headers["Origin"]
            )
            assert (forged.status, "another session" in forged.text) == (403, True), filled
        if filled != "logout":
            answer = viewed.get(filled, method=method, Cookie=reviewer, **headers)
            if answer.text != "this session is for reviews only\n":
                open_to_reviewers.append((method, filled))
    assert len(paths) == len(set(paths)) == 30
    assert open_to_reviewers == [
        ("GET", "static/x/x"), ("GET", "review"), ("GET", "review/x"), ("GET", "review/x/blob/x"), ("POST", "review/x"),
    ]  # fmt: skip


@pytest.mark.parametrize("path", ["", RUN, f"{RUN}/trials", "nothing@1", "static/x/y", "login?token=wrong"])
def test_every_answer_has_the_headers(viewed: Viewed, path: str) -> None:
    answer = viewed.get(path)
    for name, value in HEADERS.items():
        assert answer.headers[name] == value
    assert answer.headers["cache-control"] == "no-store"
    assert "server" not in answer.headers


def test_a_wrong_token_opens_no_session(viewed: Viewed) -> None:
    answer = viewed.get("login?token=wrong", Cookie="")
    assert (answer.status, "set-cookie" in answer.headers) == (401, False)


def test_an_invitation_leads_to_the_run_and_out_of_the_address(viewed: Viewed) -> None:
    answer = viewed.get(f"login?token={viewed.server.access.invite()}&run=support@2", Cookie="")
    assert (answer.status, answer.headers["location"]) == (303, "./support@2")
    assert answer.headers["referrer-policy"] == "no-referrer"
    foreign = viewed.get("login?token=" + viewed.server.access.invite() + "&run=//evil.example/")
    assert foreign.headers["location"] == "./%252F%252Fevil.example%252F"


def test_runs_are_listed_with_rates_and_progress(viewed: Viewed) -> None:
    viewed.get(RUN)  # Computes figures, which the list does not wait for.
    viewed.json(RUN)
    text = viewed.get().text
    assert all(f">{name}</a>" in text for name in ("support@1", "support@2", "endless@1", "long@1"))
    assert "10 of 40" in plain(text)
    only = viewed.get("?suite=support").text
    assert ">support@1</a>" in only
    assert ">endless@1</a>" not in only
    assert "finished" not in plain(viewed.get("?status=running").text).replace("all running finished interrupted", "")


def test_runs_are_filtered_by_their_tags(viewed: Viewed) -> None:
    text = viewed.get().text
    assert '<a href="./?tag=build%3D2" aria-label="only runs with the tag build=2">build=2</a>' in text
    assert '<option value="build=1">' in text
    only = viewed.get("?tag=build%3D2").text
    assert (">support@2</a>" in only, ">support@1</a>" in only) == (True, False)
    assert '<option value="build=2" selected>' in only
    both = viewed.get("?tag=branch%3Dmain&suite=support").text
    assert all(f">support@{number}</a>" in both for number in (1, 2))
    nothing = viewed.get("?tag=branch%3Dgone").text
    assert "No runs here with this filter" in nothing
    assert '<option value="branch=gone" selected>' in nothing
    assert HOSTILE[0] not in text


def test_two_experiments_are_chosen_by_name(viewed: Viewed) -> None:
    text = viewed.get("?suite=support").text
    form = text.partition('aria-label="compare two experiments"')[2].partition("</form>")[0]
    assert plain(form).count("baseline") >= 3
    assert re.findall(r"<label>(\w+) <select name=\"(\w)\">", form) == [("baseline", "a"), ("candidate", "b")]
    assert re.findall(r'value="([^"]+)" selected', form) == ["support@2:baseline", "support@2:careful"]
    assert 'value="support@1:careful"' in form
    assert '<button formaction="./matrix">Side by side</button>' in form
    assert 'type="radio"' not in text
    shown = viewed.get("compare?a=support@1:careful&b=support@2:careful").text
    assert "support@2:careful" in shown
    single = viewed.get("?suite=long").text
    assert re.findall(r'value="([^"]+)" selected', single)[-2:] == ["long@1:baseline", "long@1:baseline"]


def test_tokens_without_a_price_cost_an_unknown_amount(tmp_path: Path) -> None:
    store = open_store(tmp_path / "runs.db")
    run = store.create_run(record("unpriced", size=1, experiments=("baseline",)))
    result = EvalResult(
        key=TrialKey(run.run_id, "baseline", "q00", 0), ordinal=0, outcome="scored", score=Score(1.0), output="x",
        usage=TokenUsage(30, 20), unpriced_calls=1, execution=1,
    )  # fmt: skip
    store.commit(run.run_id, [result], {0: Sample("q00", "x", None, {})})
    store.update_run(run.run_id, status="finished", finished_at=1010.0)
    server, thread = start_server(tmp_path / "runs.db")
    made = Viewed(server, store, open_session(server))
    row = made.get().text.partition("<tbody>")[2].partition("</tbody>")[0]
    assert plain(row).endswith("50 unknown")
    assert "cost unknown" in plain(made.get("support@1/t/baseline/q00").text)
    server.stop()
    thread.join(60)
    store.close()


def test_a_wrong_address_is_a_page_with_a_way_back(viewed: Viewed) -> None:
    for path in ("no/such/page/here", "support@2/nothing"):
        answer = viewed.get(path, Accept="text/html")
        assert answer.status == 404
        assert re.search(r'<a href="[./]+">All runs</a>', answer.text), path


def test_a_report_has_the_figures_of_the_command_line(viewed: Viewed) -> None:
    run = viewed.store.get_run("support-run-2")
    report: EvalReport[Any] = EvalReport(viewed.store, run)
    assert viewed.json(RUN) == json.loads(json.dumps(report.to_json()))
    text = viewed.get(RUN).text
    estimate = report["baseline"].figures.get("pass_rate")
    assert estimate is not None
    assert estimate.low is not None
    assert f"{estimate.value:.1%}" in plain(text)
    assert f"{estimate.low:.1%}" in plain(text)


def test_the_counts_of_a_report_lead_to_their_trials(viewed: Viewed) -> None:
    text = viewed.get(RUN).text
    [address] = re.findall(r'href="\./(support@2/trials\?e=baseline&amp;outcome=failed)">(?:11|12)<', text)
    found = viewed.get(html.unescape(address)).text
    assert samples_of(found) == [f"q{n:02}" for n in range(0, SAMPLES_END, 3) if n % 10 != 9]


SAMPLES_END = 40


def expected(**wanted: Any) -> list[int]:
    """The ordinals that a filter selects, by a loop over the trials."""
    from tests.viewer.conftest import record, support_samples

    run = record("x")
    kept = []
    for ordinal in range(run.planned):
        made, sample = trial(run, ordinal), support_samples()[run.split(ordinal)[0]]
        state = made.outcome if made.score is None else "passed" if made.score.passed else "failed"
        facts = {"state": state, "experiment": made.experiment, **sample.metadata}
        if all(facts[name] == value for name, value in wanted.items()):
            kept.append(ordinal)
    return kept


@pytest.mark.parametrize(
    ("query", "wanted"),
    [
        ("", {}),
        ("outcome=failed", {"state": "failed"}),
        ("e=careful&outcome=passed", {"experiment": "careful", "state": "passed"}),
        ("m.kind=refund", {"kind": "refund"}),
        ("m.kind=refund&m.level=1&e=baseline", {"kind": "refund", "level": 1, "experiment": "baseline"}),
        ("outcome=task_error", {"state": "task_error"}),
    ],
)
def test_filters_select_the_same_trials_as_a_loop(viewed: Viewed, query: str, wanted: dict[str, Any]) -> None:
    found = viewed.json(f"{RUN}/trials?{query}")
    ordinals = expected(**wanted)
    assert found["total"] == len(ordinals)
    ids = [(trial["sample_id"], trial["experiment"]) for trial in found["trials"]]
    assert ids == [(f"q{at // 2:02}", ("baseline", "careful")[at % 2]) for at in ordinals][:100]


def test_a_range_and_an_order(viewed: Viewed) -> None:
    text = viewed.get(f"{RUN}/trials?latency_ms=310..&sort=-latency_ms&e=baseline").text
    assert samples_of(text) == ["q38", "q37", "q36", "q35", "q34", "q33", "q32", "q31", "q30"]


def test_an_unusable_filter_is_explained(viewed: Viewed) -> None:
    answer = viewed.get(f"{RUN}/trials?score=high")
    assert answer.status == 200
    assert "score must be a range such as 0.5..1" in plain(answer.text)


@pytest.mark.proves("R118")
def test_the_filtered_trials_have_a_pass_rate_with_the_reports_interval(viewed: Viewed) -> None:
    run = viewed.store.get_run("support-run-2")
    report: EvalReport[Any] = EvalReport(viewed.store, run)
    whole = json.loads(viewed.get(f"{RUN}/rates").text)["rates"]
    estimate = report["baseline"].figures.get("pass_rate")
    assert estimate is not None
    assert estimate.low is not None
    assert whole[0].startswith(f"baseline {estimate.value:.1%} ({estimate.low:.1%} to")
    from fairtrial.reports.tool_calls import slice_estimates

    part = next(part for part in slice_estimates(report["careful"], "kind") if part.value == "refund")["pass_rate"]
    assert part.low is not None
    assert part.high is not None
    [words] = json.loads(viewed.get(f"{RUN}/rates?m.kind=refund&e=careful").text)["rates"]
    assert words == f"careful {part.value:.1%} ({part.low:.1%} to {part.high:.1%}, {part.n} samples)"


def test_no_pass_rate_is_given_where_results_were_selected(viewed: Viewed) -> None:
    text = plain(viewed.get(f"{RUN}/trials?outcome=failed").text)
    assert "selects by the result" in text
    assert "Pass rate of these" not in text


def test_a_search_finds_outputs_and_transcripts(viewed: Viewed) -> None:
    assert samples_of(viewed.get(f"{RUN}/trials?q=order+13+was+NEVER").text) == []
    assert samples_of(viewed.get(f"{RUN}/trials?q=order+15+was+NEVER").text) == ["q15", "q15"]
    assert samples_of(viewed.get(f"{RUN}/trials?q=says+careful&m.kind=refund&outcome=failed").text) == [
        f"q{n:02}" for n in range(0, 40, 15)
    ]
    assert "No trial fits" in viewed.get(f"{RUN}/trials?q=no+such+words+anywhere").text


@pytest.mark.proves("R119")
def test_a_trial_is_shown_whole(viewed: Viewed) -> None:
    page = viewed.get(f"{RUN}/t/baseline/q15").text
    text = plain(page)
    shown = re.findall(r'class="ev (\w+)[^>]*><summary><span class="label">([^<]*)', page)
    assert ("tool", "find_order") in shown, shown
    for part in (
        "Where is order 15?", "Order 15 was never seen, says baseline.", "not what was asked for",
        "failed, score 0.250", "find_order", "You help customers.", "reasoning", "I should be brief.",
        "judge-model", "a fine answer",
        "kind refund", "45 + 20", "30 ms", "12 ms",
    ):  # fmt: skip
        assert part in text, part
    found = viewed.json(f"{RUN}/t/baseline/q15")["trials"][0]
    assert (found["sample"]["input"], len(found["events"])) == ("Where is order 15?", 7)


def test_a_trial_links_to_its_neighbours_within_the_filter(viewed: Viewed) -> None:
    table = viewed.get(f"{RUN}/trials?e=baseline&outcome=failed").text
    second = html.unescape(re.findall(r'<a class="main" href="\.\./([^"]+)">\s*q03', table)[0])
    page = viewed.get(second).text
    around = {name: html.unescape(re.findall(rf'rel="{name}" href="([^"]+)"', page)[0]) for name in ("prev", "next")}
    assert "/baseline/q00?" in around["prev"]
    assert "/baseline/q06?" in around["next"]
    assert "e%3Dbaseline%26outcome%3Dfailed" in around["next"]


def test_lanes_and_forms_of_a_transcript(viewed: Viewed) -> None:
    judge = viewed.get(f"{RUN}/t/baseline/q15?lane=judge").text
    assert judge.count('<details open class="ev judge') == 1
    assert '<details open class="ev message' not in judge
    raw = viewed.get(f"{RUN}/t/baseline/q15?form=raw").text
    assert "fairtrial:ChatMessage" in html.unescape(raw)


def test_the_trials_of_a_filter_are_exported(viewed: Viewed) -> None:
    answer = viewed.get(f"{RUN}/trials.csv?e=careful&outcome=failed")
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    assert [row["sample_id"] for row in rows] == [f"q{n:02}" for n in range(0, 40, 5) if n % 10 != 9]
    assert answer.headers["content-disposition"] == 'attachment; filename="support-2-trials.csv"'
    lines = viewed.get(f"{RUN}/trials.jsonl?outcome=task_error").text.splitlines()
    assert [json.loads(line)["outcome"] for line in lines] == ["task_error"] * 8


def test_the_trials_of_a_filter_are_exported_as_parquet(viewed: Viewed) -> None:
    import pyarrow.parquet as pq

    connection = http.client.HTTPConnection("127.0.0.1", viewed.server.port, timeout=120)
    path = f"/{viewed.prefix}/{RUN}/trials.parquet?e=careful&m.kind=refund"
    connection.request("GET", path, headers={"Cookie": viewed.cookie})
    answer = connection.getresponse()
    assert answer.getheader("content-disposition") == 'attachment; filename="support-2-trials.parquet"'
    rows = pq.read_table(io.BytesIO(answer.read())).to_pylist()
    connection.close()
    wanted = expected(kind="refund", experiment="careful")
    assert [row["sample_id"] for row in rows] == [f"q{at // 2:02}" for at in wanted]
    assert {(row["experiment"], row["metadata.kind"]) for row in rows} == {("careful", "refund")}
    assert 'href="trials.parquet">parquet</a>' in viewed.get(f"{RUN}/trials").text


def test_cells_that_look_like_formulas_are_quoted() -> None:
    from fairtrial.viewer.pages.trials import cell_text

    assert [cell_text(text, raw=False) for text in ("=1+1", "-2", "@x", "+x", "safe", "")] == [
        "'=1+1", "'-2", "'@x", "'+x", "safe", "",
    ]  # fmt: skip
    assert cell_text("=1+1", raw=True) == "=1+1"


@pytest.mark.proves("R120")
def test_a_comparison_has_the_verdict_before_the_flips(viewed: Viewed) -> None:
    run = viewed.store.get_run("support-run-2")
    report: EvalReport[Any] = EvalReport(viewed.store, run)
    record = compare(report["baseline"], report["careful"])
    path = f"compare?a={RUN}:baseline&b={RUN}:careful"
    assert viewed.json(path) == json.loads(json.dumps(record.to_json()))
    text = viewed.get(path).text
    verdict = text.index('class="verdict')
    assert verdict < text.index('id="flips"')
    gained = [n for n in range(40) if n % 3 == 0 and n % 5 and n % 10 != 9]
    lost = [n for n in range(40) if n % 5 == 0 and n % 3]
    assert f"{len(lost)} lost, {len(gained)} gained" in plain(text)
    assert samples_of(viewed.get(f"{path}&kind=gained").text) == [f"q{n:02}" for n in gained]
    assert "No sample lost" in plain(viewed.get(f"compare?a=support@1:baseline&b={RUN}:baseline").text)


def test_samples_of_another_order_are_compared_by_their_ids(tmp_path: Path) -> None:
    """A sample that only one side has is missing; outputs are those of the sample, not of its place."""
    store = open_store(tmp_path / "runs.db")
    add_support_runs(store)
    run = store.create_run(record("reversed-run", "reversed", 5, experiments=("baseline",)))
    known = {sample.id: sample for _, sample in store.samples("support-run-2")}
    samples = {place: known[f"q{8 - place:02}"] for place in range(4)}
    samples[4] = Sample("q99", "Where is it?", "Friday")
    results = []
    for place, sample in samples.items():
        key = TrialKey(run.run_id, "baseline", sample.id, 0)
        score = Score(1.0 - place / 10, False)
        results.append(
            EvalResult(
                key=key,
                ordinal=place,
                outcome="scored",
                score=score,
                output=f"none for {sample.id}",
                execution=place + 1,
            )
        )
    store.commit(run.run_id, results, samples)
    store.update_run(run.run_id, status="finished", finished_at=3000.0)
    server, thread = start_server(tmp_path / "runs.db")
    text = (
        Viewed(server, store, open_session(server))
        .get(f"compare?a={RUN}:baseline&b=reversed@1:baseline&kind=lost")
        .text
    )
    assert samples_of(text) == ["q05", "q07", "q08"]  # q06 had failed before. The largest change of the score first.
    for name in samples_of(text):
        assert f"none for {name}" in plain(text)
    assert "3 lost, 0 gained" in plain(text)
    server.stop()
    thread.join(60)
    store.close()


def test_pages_are_sent_at_once(viewed: Viewed) -> None:
    """Without TCP_NODELAY, a browser that keeps its connection waits 40 ms for the second half of a page."""
    assert viewed.server._listening.proto == socket.IPPROTO_TCP


def test_a_sample_is_shown_side_by_side(viewed: Viewed) -> None:
    text = viewed.get(f"compare/sample?a={RUN}:baseline&b={RUN}:careful&id=q03").text
    assert "<mark>was never seen, " in text
    assert "<mark>arrives on Friday, " in text
    assert viewed.get(f"compare/sample?a={RUN}:baseline&b={RUN}:careful&id=zz").status == 404
    assert viewed.get("compare").status == 404


def test_the_history_of_a_suite_has_every_finished_run(viewed: Viewed) -> None:
    text = viewed.get("history?suite=support").text
    assert "support@1" in text
    assert "support@2" in text
    assert text.count('<svg class="ft-plot"') == 2
    assert viewed.get("history?suite=nothing").status == 404


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("support@9", 404, "has no run 9"),
        ("suport@1", 404, "there is no run"),
        (f"{RUN}/t/baseline/zz", 404, "no result for sample"),
        (f"{RUN}/t/nothing/q01", 404, "no result for sample"),
        (f"{RUN}/trials.xlsx", 404, "trials.csv"),
        (f"{RUN}/blob/{'0' * 64}?o=1", 404, "no trial of this run refers"),
        ("support/no/such/page", 404, "There is no such page. The list of runs leads"),
        (f"{RUN}/blob/..%2f..%2fetc%2fpasswd?o=1", 404, ""),
        ("static/../view.css", 404, ""),
    ],
)
def test_what_is_missing_is_said(viewed: Viewed, path: str, status: int, words: str) -> None:
    answer = viewed.get(path)
    assert answer.status == status
    assert words in plain(answer.text)


def test_a_running_run_shows_progress_and_no_rate(viewed: Viewed) -> None:
    text = plain(viewed.get("endless@1").text)
    assert "10 of 40 trials" in text
    assert "no pass rate is shown" in text
    assert "95% interval" not in text


@pytest.mark.proves("R121")
def test_the_progress_of_a_run_is_streamed_until_it_ends(tmp_path: Path) -> None:
    from tests.viewer.conftest import add_running_run, support_samples

    store = open_store(tmp_path / "runs.db")
    add_running_run(store)
    server, thread = start_server(tmp_path / "runs.db")
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    connection.request("GET", f"/{server.access.prefix}/endless@1/live", headers={"Cookie": open_session(server)})
    answer = connection.getresponse()
    assert answer.getheader("content-type", "").startswith("text/event-stream")

    def following(name: str) -> dict[str, Any]:
        while True:
            line = answer.readline().decode().strip()
            if line == f"event: {name}":
                found: dict[str, Any] = json.loads(answer.readline().decode().removeprefix("data: "))
                return found

    assert following("progress") == {
        "status": "running",
        "planned": 40,
        "stored": 10,
        "errors": 1,
        "tokens": 9 * 50 + 36,
    }
    run = store.get_run("running-run")
    store.commit(run.run_id, [trial(run, ordinal) for ordinal in range(10, 40)], support_samples())
    assert following("progress")["stored"] == 40
    store.update_run(run.run_id, status="finished", finished_at=2000.0)
    assert following("progress")["status"] == "finished"
    assert following("ended") == {}
    connection.close()
    server.stop()
    thread.join(60)
    assert not thread.is_alive()
    store.close()


@pytest.mark.proves("R117")
def test_hostile_texts_are_text_on_every_page(viewed: Viewed) -> None:
    run = viewed.store.get_run("hostile-run")
    name = segment(run.name)
    pages = [
        name,
        f"{name}/trials",
        "",
        "history?suite=%3Cimg%20src%3Dx%20onerror%3Dhit%3D1%3E",
        "history?suite=%3Cimg%20src%3Dx%20onerror%3Dhit%3D1%3E&by=run&alarm=1&since=%3Cbase&end=%3Cscript%3E",
    ]
    for place, text in enumerate(HOSTILE):
        for form in ("text", "markdown", "raw"):
            pages.append(f"{name}/t/{segment(run.experiments[1])}/{segment(f'{place}/{text}')}?form={form}")
    for path in pages:
        answer = viewed.get(path)
        assert answer.status == 200, path
        for attack in (
            "<script>",
            "<img src=x",
            "<svg/onload",
            "<iframe",
            "<base",
            "<meta http-equiv=refresh",
            "<style>",
        ):
            assert attack not in answer.text, path
        assert "\u202e" not in plain(answer.text)
        assert "\x1b" not in plain(answer.text)


def test_a_store_that_goes_away_is_said_to_be_away(tmp_path: Path) -> None:
    store = open_store(tmp_path / "runs.db")
    add_support_runs(store)
    server, thread = start_server(tmp_path / "runs.db", read_only=True)
    seen = Viewed(server, store, open_session(server))
    assert seen.get("support@1/trials").status == 200
    server.store.close()
    answer = seen.get("support@1/trials")
    assert (answer.status, "cannot be read" in answer.text) == (503, True)
    server.stop()
    thread.join(60)
    assert not thread.is_alive()
    store.close()


def test_a_server_that_is_stopped_while_it_computes_ends(tmp_path: Path) -> None:
    store = open_store(tmp_path / "runs.db")
    add_support_runs(store)
    server, thread = start_server(tmp_path / "runs.db")
    seen = Viewed(server, store, open_session(server))
    assert seen.get().status == 200  # Statistics of both runs are queued by now.
    server.stop()
    thread.join(60)
    assert not thread.is_alive()
    store.close()


def test_the_question_of_a_judge_is_shown_if_its_hash_agrees(tmp_path: Path) -> None:
    from fairtrial.models.judges import llm_judge
    from fairtrial.models.judges.checks import judge_notes
    from fairtrial.models.judges.judge import fenced_messages, material_of, prompt_digest
    from fairtrial.models.scripted import ScriptedAdapter
    from fairtrial.store.notes import write_notes
    from fairtrial.viewer.pages.trial import trial_values

    judge = llm_judge(ScriptedAdapter([]), "The customer learns when the order comes.")
    store = open_store(tmp_path / "runs.db")
    add_support_runs(store)
    store.update_run("support-run-2", notes=write_notes(judges=judge_notes(judge)))
    run = store.get_run("support-run-2")
    [result] = store.results(run.run_id, experiment="baseline", sample_ids=["q15"])
    assert result.score is not None
    pieces = material_of(result.sample, result.output, include_input=True)
    asked = prompt_digest(fenced_messages(pieces, judge.question or ""))
    for sha256, agrees in ((asked, True), ("ab" * 32, False)):
        [metric] = result.score.metrics
        changed = replace(metric, metadata={**metric.metadata, "prompt_sha256": sha256})
        made = replace(result, score=replace(result.score, metrics=(changed,)))
        [shown] = trial_values(run, made, {})["judge"]
        assert (shown.asked is not None, shown.has_digest) == (agrees, True)
        if shown.asked is not None:
            assert "The customer learns when the order comes." in shown.asked[1][1]
    store.close()


def test_a_conversation_that_was_not_recorded_is_said_to_be_missing(tmp_path: Path) -> None:
    from fairtrial import Sample, Score, Session, TokenUsage
    from fairtrial.data.session.events import PromptExecuted
    from fairtrial.trials.context import TrialKey
    from fairtrial.trials.result import EvalResult
    from tests.viewer.conftest import record

    store = open_store(tmp_path / "runs.db")
    run = store.create_run(record("by-hand", "by-hand", 2, experiments=("baseline",)))
    samples: dict[int, Sample[Any, Any]] = {at: Sample(f"q{at}", "What?") for at in (0, 1)}
    results = []
    for at in samples:
        session = Session(tags={})
        if at:
            session.record(ChatMessage("user", "What?"))
        session.record(PromptExecuted(model="fake", usage=TokenUsage(10, 5)))
        key = TrialKey(run.run_id, "baseline", f"q{at}", 0)
        results.append(
            EvalResult(
                key=key,
                ordinal=at,
                outcome="scored",
                score=Score(1.0),
                output="x",
                execution=at + 1,
                snapshot=session.snapshot(),
            )
        )
    store.commit(run.run_id, results, samples)
    store.update_run(run.run_id, status="finished", finished_at=1005.0)
    server, thread = start_server(tmp_path / "runs.db")
    seen = Viewed(server, store, open_session(server))
    hint = "did not record the conversation"
    assert [hint in seen.get(f"by-hand@1/t/baseline/q{at}").text for at in (0, 1)] == [True, False]
    server.stop()
    thread.join(60)
    assert not thread.is_alive()
    store.close()


def test_runs_of_different_users_are_compared_if_asked_for_and_a_trial_shows_what_its_user_was_told(
    tmp_path: Path,
) -> None:
    store = open_store(tmp_path / "runs.db")
    for name in ("user-1", "user-2"):
        user = simulated_user(
            ScriptedAdapter(lambda messages: "Hi" if len(messages) == 2 else [END], model=name),
            knows=["paid 12", "Ann"],
        )
        suite_of(conversation_task(agent(), user), solved, samples=6).run_sync(store=store, resume="never")
    server, thread = start_server(tmp_path / "runs.db")
    seen = Viewed(server, store, open_session(server))
    path = "compare?a=talk@1:baseline&b=talk@2:baseline"
    refused = seen.get(path)
    assert refused.status == 422
    assert "run both with the same user" not in refused.text.partition("</h1>")[0]
    assert "run both with the same user" in plain(refused.text)
    asked = seen.get(f"{path}&other_users=1")
    assert asked.status == 200
    assert "talked to different users" in plain(asked.text)
    links = [html.unescape(link) for link in re.findall(r'href="([^"]*compare\?[^"]*)"', asked.text)]
    assert len(links) > 3
    assert all("other_users=1" in link for link in links)
    page = seen.get("talk@1/t/baseline/s0").text
    assert "knows:\n- paid 12\n- Ann" in html.unescape(page)
    assert "user tokens" in page
    assert "cost_usd" not in page
    server.stop()
    thread.join(60)
    assert not thread.is_alive()
    store.close()
