"""Reports in a terminal: tables that never wrap, small bars, and no control codes from samples or models."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich.cells import cell_len
from rich.console import Console

from fairtrial import EvalReport, Metric, TokenUsage, compare, gate
from fairtrial.reports.render import terminal
from fairtrial.reports.render.document import (
    Bar,
    Cases,
    Cell,
    Column,
    Conclusion,
    Document,
    Plot,
    Remarks,
    Section,
    Table,
    TrialDetails,
)
from fairtrial.reports.render.markdown import as_markdown, escaped, quoted
from fairtrial.reports.render.safe_text import plain
from tests.reports.build import stored
from tests.reports.made import FAIL, HOSTILE, PASS, TASK_ERROR, Made, hostile_report, made_report

GOLDEN = Path(__file__).with_name("golden")
CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\ud800-\udfff]")


def small(**changes: Any) -> EvalReport:
    """Two experiments, repeats, every kind of outcome, a graded metric and one without bounds."""
    usage = TokenUsage(120, 30, 0, 0.0004)

    def trial(place: int, experiment: str, repeat: int) -> Made | None:
        if place == 3 and experiment == "terse":
            return TASK_ERROR if repeat else Made(None, "timeout", error="after 300 s")
        if place == 5 and repeat == 1:
            return Made(None, "scorer_error", error="judge down")
        if place == 9:
            return None
        good = (place + repeat) % (4 if experiment == "baseline" else 2) != 0
        metrics = (Metric("brevity", 0.2 + 0.05 * place, bounds=(0, 1)), Metric("words", 100.0 + 10 * place + repeat))
        return Made(1.0 if good else 0.25, reason="so it seems", metrics=metrics, latency_ms=900 + place, usage=usage)

    options: dict[str, Any] = {"samples": 10, "repeats": 2, "experiments": ("baseline", "terse")}
    return made_report(trial, **{**options, **changes})


def one(**changes: Any) -> EvalReport:
    return made_report(lambda place, *_: TASK_ERROR if place == 9 else FAIL if place < 3 else PASS, **changes)


def paired() -> EvalReport:
    return made_report(
        lambda place, experiment, _: PASS if place % (9 if experiment == "baseline" else 3) else FAIL,
        samples=60,
        experiments=("baseline", "terse"),
        metadata=lambda place: {"topic": "billing" if place % 2 else "shipping"},
    )


def full(report: Any) -> str:
    return str(report.in_detail())


def documents() -> dict[str, Document]:
    pair = paired()
    compared = compare(pair["baseline"], pair["terse"], slice_by="topic")
    decided = gate(pair["terse"], {"min_pass_rate": 0.6, "margin": 0.02}, pair["baseline"])
    return {
        "one_experiment": one().document(0),
        "one_experiment_full": one().in_detail().document(0),
        "two_experiments": small().document(0),
        "two_experiments_full": small().in_detail().document(0),
        "comparison": compared.document(0),
        "gate": decided.document(0),
    }


@pytest.mark.parametrize(
    "name",
    ["one_experiment", "one_experiment_full", "two_experiments", "two_experiments_full", "comparison", "gate"],
)
def test_at_80_columns_it_reads_as_it_always_has(name: str) -> None:
    path = GOLDEN / f"{name}.txt"
    text = terminal.as_text(documents()[name]) + "\n"
    if os.environ.get("FAIRTRIAL_GOLDEN") == "write":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [40, 60, 80, 100, 140])
def test_no_line_is_wider_than_the_terminal_and_no_row_wraps(width: int) -> None:
    for name, document in [*documents().items(), ("hostile", hostile_report().document(0))]:
        lines = terminal.as_text(document, width=width).splitlines()
        assert max(cell_len(line) for line in lines) <= width, name
        rows = [line for line in lines if "95% interval" in line and "errors" in line]
        if width >= 80 and name.startswith(("one", "two")):
            assert len(rows) == 1


@pytest.mark.proves("R44")
def test_both_rates_their_intervals_n_and_every_kind_of_error_are_always_there() -> None:
    assert re.search(r"baseline +66\.7% +29\.9% to 92\.5% +9 +1 +60\.0%", str(one()))
    text = full(one())
    assert re.search(r"baseline +66\.7% +29\.9% to 92\.5% +9 +1 +60\.0%", text)
    assert re.search(r"errors as failures +60\.0% +26\.2% to 87\.8% +10 ", text)
    assert re.search(r"baseline +10 +9 +1 +0 +0 +0", text)
    for word in ("planned", "scored", "task", "scorer", "timeouts", "not"):
        assert word in text


def test_an_undefined_figure_is_a_dash_with_its_reason_below() -> None:
    text = full(made_report(lambda *_: TASK_ERROR, samples=3))
    assert re.search(r"baseline +- +- +0 +3 +0\.0%", text)
    assert re.search(r"errors as failures +0\.0% +0\.0% to 70\.8% +3", text)
    assert "\nNo trial was scored.\n" in text
    assert "the same figures" not in text
    assert "no samples" not in text
    unscored = Made(None, "scorer_error", error="judge down")
    report = made_report(lambda *_: unscored, samples=3, repeats=2)
    assert "no samples" not in str(report)
    assert "no samples" not in str(report.to_json())


def test_errors_are_grouped_and_counted_in_every_format() -> None:
    def outcome(place: int, experiment: str, repeat: int) -> Made:
        if place < 30:
            return Made(None, "task_error", error=f"KeyError: 'user {place}'")
        return Made(None, "scorer_error" if place % 2 else "task_error", error=f"{'ABCDE'[place % 5]}Error: no")

    report = made_report(outcome, samples=50, experiments=("a", "b"))
    assert "There are no samples" not in str(report)
    expected = [
        "60 x KeyError: 'user 0' and similar",
        "4 x AError: no",
        "4 x BError: no",
        "4 x CError: no",
        "28 more errors, of 7 other kinds",
    ]
    lines = full(report).splitlines()
    first = lines.index(expected[0])
    assert lines[first : first + 5] == expected
    assert "- 60 x KeyError: 'user 0' and similar" in report.to_markdown().replace("\\", "")
    assert "60 x KeyError: &#x27;user 0&#x27; and similar" in report.to_html()
    experiments: Any = report.to_json()["experiments"]
    found = experiments[1]["errors"]
    assert len(found) == 11
    assert found[0] == {
        "trials": 30, "outcome": "task_error", "error": "KeyError: 'user 0'", "location": "",
        "sample_id": "sample-00", "varied": True,
    }  # fmt: skip


def test_more_errors_than_are_read_are_mentioned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairtrial.reports.figures.error_groups.READ_ERRORS", 3)
    text = full(made_report(lambda *_: TASK_ERROR, samples=8))
    assert "3 x ValueError: no\nOnly the first 3 of 8 errors were grouped.\n" in text


def test_a_run_without_samples_or_with_one_still_reads() -> None:
    assert re.search(r"baseline +- +- +0", str(made_report(lambda *_: PASS, samples=0)))
    assert re.search(r"baseline +100\.0% +2\.5% to 100\.0% +1", str(made_report(lambda *_: PASS, samples=1)))


def test_a_rate_that_is_not_quite_whole_is_not_rounded_to_it() -> None:
    report = made_report(lambda place, *_: FAIL if place == 0 else PASS, samples=4_000)
    assert re.search(r"baseline +>99\.9% +99\.9% to >99\.9%", str(report))


def test_dead_letters_have_a_column_when_there_are_any() -> None:
    lost = Made(None, "dead_letter", error="5 deliveries")
    text = full(made_report(lambda place, *_: lost if place == 1 else PASS))
    assert "letters" in text
    assert re.search(r"baseline +10 +9 +0 +0 +0 +1 +0", text)
    assert "letters" not in full(one())


def test_a_metric_that_only_one_experiment_has_is_a_dash_in_the_other() -> None:
    made = {"a": Made(1.0, metrics=(Metric("brevity", 0.5),)), "b": PASS}
    report = made_report(lambda _, experiment, __: made[experiment], experiments=("a", "b"), repeats=2)
    assert re.search(r"brevity\n  a +0\.500 .*\n  b +- +- +0 +0$", full(report), re.MULTILINE)


def test_caveats_of_a_run_are_shown() -> None:
    broken = Made(None, "scorer_error", error="judge down")
    report = made_report(lambda *_: broken, status="unscored", notes={"code_changed": True}, samples=2)
    text = " ".join(str(report).split())
    assert "2 trials could not be scored; run the same command again to score them without calling the task." in text
    assert "results of two code versions" in text


def test_six_experiments_with_five_metrics_fit_on_two_screens() -> None:
    metrics = ("accuracy", "brevity", "faithfulness", "fluency", "safety")

    def trial(place: int, experiment: str, repeat: int) -> Made:
        parts = tuple(
            Metric(name, value := (place * 7 + at + len(experiment)) % 10 / 10, passed=value > 0.5, bounds=(0, 1))
            for at, name in enumerate(metrics)
        )
        return Made(parts[0].value, passed=False, metrics=parts)

    names = tuple(f"model-{number}" for number in range(6))
    report = made_report(trial, samples=40, repeats=2, experiments=names)
    assert len(str(report).splitlines()) <= 28
    lines = full(report).splitlines()
    assert len(lines) <= 120  # The answer, and two screens of 50 lines.
    assert max(map(len, lines)) <= 80
    for title in ("accuracy", "faithfulness"):
        heading = next(at for at, line in enumerate(lines) if line.startswith(f"{title} "))
        assert re.fullmatch(rf"{title} +pass rate +95% interval +mean +95% interval +samples +trials", lines[heading])
        assert re.fullmatch(
            r"model-0 +[\d.]+% +[\d.]+% to [\d.]+% +0\.\d+ +0\.\d+ to 0\.\d+ +40 +80", lines[heading + 1]
        )
    assert "pass@2  " in full(report)


def test_an_experiment_alone_can_be_shown() -> None:
    part = small()["terse"]
    assert "baseline" not in str(part)
    assert re.search(r"terse +20 +15 +1 +1 +1 +2", full(part))
    assert repr(part) == "<ExperimentReport terse of run0000001: 18 of 20 trials>"
    assert "<table>" in part._repr_html_()


def test_repeats_show_pass_at_k_and_where_the_variance_lies() -> None:
    text = " ".join(full(small()).split())
    assert "pass@2" in text
    assert "pass^2" in text
    assert "Repeats of one sample are not independent, so they do not count as more samples." in text


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([[1.0] * 3] * 8 + [[0.0] * 3] * 4, "Repeats agreed every time: 1 repeat is enough; more samples narrow the"),
        (
            [[1.0, 0.0, 1.0]] * 6 + [[1.0] * 3] * 6 + [[0.0] * 3] * 6,
            "Repeats of a sample differ: more of them narrow the interval",
        ),
        ([[1.0, 0.0]] * 12, "Repeats differ as much as samples do: more of either narrows the interval."),
        ([[1.0] * 9] * 30 + [[0.0] * 9] * 29 + [[1.0] * 8 + [0.0]], "More repeats would hardly narrow the interval;"),
    ],
)
def test_repeats_come_with_an_order(rows: list[list[float]], sentence: str) -> None:
    assert sentence in " ".join(full(stored(rows)).split())


def test_few_clusters_say_that_they_are_taken_to_be_similar() -> None:
    report = stored([0.0] + [1.0] * 39, metadata=[{"cluster": place // 5} for place in range(40)])
    assert "8 clusters are too few to estimate how similar their samples are" in " ".join(str(report).split())


def test_clusters_are_found_in_the_metadata_and_counted() -> None:
    report = one(metadata=lambda place: {"cluster": place // 2})
    assert re.search(r"baseline +66\.7% .* 9 +5 ", str(report))
    assert "Only 2 clusters" in str(one(metadata=lambda place: {"cluster": place % 2}))


def test_text_that_others_wrote_brings_no_codes_no_markup_and_no_lines() -> None:
    for text in (str(hostile_report()), terminal.as_text(hostile_report().document(5))):
        assert not CONTROL.search(text)
        assert "[bold red]markup[/]" in text


@pytest.mark.parametrize("width", [80, 140])
def test_a_rich_console_gets_colours_and_a_file_gets_none(width: int) -> None:
    shown, filed = io.StringIO(), io.StringIO()
    Console(file=shown, force_terminal=True, color_system="truecolor", width=width).print(small())
    Console(file=filed, width=width).print(small())
    assert "\x1b[" in shown.getvalue()
    assert "\x1b" not in filed.getvalue()
    lines = [line.rstrip() for line in filed.getvalue().splitlines()]
    assert lines == terminal.as_text(small().document(0), width=width).splitlines()
    hostile = io.StringIO()
    Console(file=hostile, force_terminal=True, width=width).print(hostile_report())
    assert not re.search("\x1b(?!\\[[0-9;]*m)", hostile.getvalue())


def test_a_console_that_knows_only_ascii_gets_bars_in_ascii() -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii", errors="strict")
    report = made_report(lambda place, *_: FAIL if place < 3 else PASS)
    Console(file=file, width=80).print(report)
    Console(file=file, width=80).print(hostile_report(suite="caf\u00e9"))
    file.flush()
    assert b"caf?" in raw.getvalue()
    assert b"[---" in raw.getvalue()
    assert terminal.as_text(report.document(0), encoding="no-such-encoding").isascii()
    assert terminal.glyphs_for("cp1252") is terminal.ASCII
    assert terminal.glyphs_for("no-such-encoding") is terminal.ASCII
    assert terminal.glyphs_for("utf-8") is terminal.glyphs_for(None) is terminal.UNICODE


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "cp1252"])
def test_printed_into_a_pipe_it_is_plain_text_of_80_columns(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    one().save(path)
    done = subprocess.run(
        [sys.executable, "-c", "import sys, fairtrial; print(fairtrial.EvalReport.load(sys.argv[1]))", str(path)],
        capture_output=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(str(Path(part).resolve()) for part in sys.path if part),
            "PYTHONIOENCODING": encoding,
            "FORCE_COLOR": "",
            "COLUMNS": "200",
        },
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    text = done.stdout.decode(encoding)
    assert "\x1b" not in text
    assert max(cell_len(line) for line in text.splitlines()) <= 80
    assert "66.7%" in text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_printed_on_a_terminal_it_is_as_wide_as_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert terminal.width_of(Terminal(), 80) == 120
    assert terminal.width_of(io.StringIO(), 80) == 80
    monkeypatch.setenv("COLUMNS", "500")
    assert terminal.width_of(Terminal(), 80) == 140


class TestBars:
    def test_an_interval_lies_where_its_numbers_say(self) -> None:
        assert terminal.bar(Bar(0.25, 0.5, 0.75), 9).plain == "··├─●─┤··"
        assert terminal.bar(Bar(0.0, 0.0, 0.25), 9).plain == "●─┤······"
        assert terminal.bar(Bar(0.75, 1.0, 1.0), 9).plain == "······├─●"

    def test_a_difference_is_drawn_around_0(self) -> None:
        assert terminal.bar(Bar(-0.5, -0.25, -0.1, -1, 1, mark=0.0), 11).plain[5] == "│"

    def test_intervals_outside_the_scale_are_cut_at_its_end(self) -> None:
        assert terminal.bar(Bar(-3, 0.5, 7), 5).plain == "├─●─┤"


class TestTables:
    COLUMNS = (Column("name", "left", name=True), Column("figure"), Column("other"))

    def test_a_screen_too_narrow_for_rows_gets_every_figure_on_a_line_of_its_own(self) -> None:
        table = Table(
            "caption", self.COLUMNS, (Section("part"), ("a name", "123456789012", "-0.123456789"), ("b", "1", "2"))
        )
        text = terminal.as_text(Document("title", (), (table,)), width=30)
        assert "  figure 123456789012" in text
        assert "  other -0.123456789" in text
        assert max(map(len, text.splitlines())) <= 30

    def test_wide_characters_count_double(self) -> None:
        table = Table("", self.COLUMNS, (("漢字" * 40, "1", "2"), ("b", "10", "20")))
        lines = terminal.as_text(Document("t", (), (table,)), width=60).splitlines()
        assert {cell_len(line) for line in lines[2:]} == {60}

    def test_long_names_with_a_common_prefix_are_cut_so_that_they_stay_different(self) -> None:
        names = [f"support-agent-with-retrieval-over-the-handbook-and-temperature-0.{place}" for place in range(3)]
        rows = tuple((name, "1", "2") for name in names)
        sections = tuple(row for name in names for row in (Section(name), ("passed", "1", "2")))
        for width in (40, 60):
            for table in (Table("", self.COLUMNS, rows), Table("", self.COLUMNS, sections)):
                lines = terminal.as_text(Document("t", (), (table,)), width=width).splitlines()
                for place in range(3):
                    assert [line.split()[0][-4:] for line in lines if line].count(f"-0.{place}") == 1
                assert max(map(len, lines)) <= width

    def test_plots_and_empty_remarks_take_no_space(self) -> None:
        document = Document("t", (), (Plot("p", "<svg/>"), Remarks(())))
        assert terminal.as_text(document) == "t"

    def test_cases_are_one_line_each_and_the_rest_is_counted(self) -> None:
        items = [TrialDetails(f"s{place}", "failed", "bad", (("output", "x" * 200),)) for place in range(30)]
        lines = terminal.as_text(Document("t", (), (Cases("Failures", 30, 30, items),))).splitlines()
        assert len([line for line in lines if line.startswith("failed  s")]) == 10
        assert lines[-1] == "and 20 more"
        assert max(map(len, lines)) <= 80


def test_figures_that_repeat_others_are_replaced_by_a_remark() -> None:
    said = full(made_report(lambda place, *_: FAIL if place < 3 else PASS))
    assert "mean score  " not in said
    assert "with errors as failures  " not in said
    assert "With errors as failures, the figures are the same." in said
    assert "The mean score has the same figures as the pass rate." in said


def test_figures_that_say_something_of_their_own_stay() -> None:
    graded = made_report(lambda place, *_: TASK_ERROR if place == 9 else Made(0.25 if place < 3 else 0.75))
    said = full(graded)
    for title in ("pass rate", "with errors as failures", "with errors as 0"):
        assert f"\n{title}  " in said
    assert "the same" not in said


def test_where_nothing_was_scored_errors_as_failures_are_not_the_same() -> None:
    said = full(made_report(lambda *_: TASK_ERROR))
    assert re.search(r"\nbaseline +-  ", said)
    assert "\nwith errors as failures      0.0%  " in said
    assert "With errors as failures, the figures are the same." not in said


def test_characters_missing_in_an_encoding_become_question_marks_of_the_same_width() -> None:
    assert terminal.writable("日本 é…", "ascii") == "???? ?~"
    assert terminal.writable("日本 é…", "cp1252") == "???? é…"
    assert terminal.writable("日本 é…", None) == "日本 é…"


@pytest.mark.parametrize(
    ("names", "cut"),
    [
        (["short", "a-long-name-of-a-system"], ["a-long-na…"]),
        (["a-long-name-of-one", "b-long-name-of-two"], ["a-long-na…", "b-long-na…"]),
        (["a-long-name-of-1", "a-long-name-of-2"], ["a-lo…-of-1", "a-lo…-of-2"]),
        (["prefix-before-1-and-suffix", "prefix-before-2-and-suffix"], ["…1-and-su…", "…2-and-su…"]),
        (["漢字漢字漢字漢字1", "漢字漢字漢字漢字2"], ["漢字…漢字1", "漢字…漢字2"]),
    ],
)
def test_names_are_cut_at_the_end_unless_they_would_look_the_same(names: list[str], cut: list[str]) -> None:
    assert list(terminal.cut_names(names, 10).values()) == cut
    assert all(cell_len(name) <= 10 for name in cut)


# Reports as Markdown: text of models is escaped, tables keep their shape, and nothing is fetched.


READER = MarkdownIt("commonmark").enable(["table", "strikethrough"])
LINKS = re.compile(r"@\w|#\d|\bGH-\d|\b\w+://|\bwww\.", re.IGNORECASE)


def tokens(text: str) -> Iterator[Token]:
    for token in READER.parse(text):
        yield token
        yield from token.children or ()


def spoken(text: str) -> str:
    """The words a reader sees, outside of code."""
    return "".join(token.content for token in tokens(text) if token.type == "text")


def test_text_of_models_is_escaped() -> None:
    text = hostile_report().to_markdown()
    kinds = {token.type for token in tokens(text)}
    assert not kinds & {"link_open", "image", "html_inline", "fence", "code_block", "hr", "em_open", "s_open"}
    assert all(
        re.fullmatch(
            r"</details>|<details><summary>(Details|(Errors|Did not pass): [\w ,]+)</summary>", token.content.strip()
        )
        for token in tokens(text)
        if token.type == "html_block"
    )
    assert not LINKS.search(spoken(text))
    assert "<script>document.title='owned'</script>" in spoken(text)
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\ud800-\udfff]", text)


def test_every_row_of_a_table_has_as_many_cells_as_its_head() -> None:
    text = hostile_report().to_markdown()
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) > 10
    opened = [token for token in tokens(text) if token.type in ("table_open", "th_open", "td_open", "tr_open")]
    tables: list[list[int]] = []
    for token in opened:
        if token.type == "table_open":
            tables.append([])
        elif token.type == "tr_open":
            tables[-1].append(0)
        else:
            tables[-1][-1] += 1
    assert sum(len(table) for table in tables) == len(rows) - len(tables)  # All but the lines below the heads.
    assert all(len(set(table)) == 1 for table in tables)


@given(st.text())
def test_any_text_is_shown_as_it_is(text: str) -> None:
    shown = spoken(f"x{escaped(text)}x").replace("\u200b", "")
    assert shown == f"x{plain(text)}x".replace("\u200b", "")
    found = {token.type for token in tokens(f"| a |\n|--|\n| {escaped(text)} |")}
    assert found <= {
        "table_open", "thead_open", "tr_open", "th_open", "th_close", "tr_close", "thead_close", "tbody_open",
        "td_open", "td_close", "tbody_close", "table_close", "inline", "text",
    }  # fmt: skip


@given(st.text(alphabet="`a |\\\n~", max_size=12))
def test_any_text_is_quoted_as_it_is(text: str) -> None:
    quote = quoted(text, 100)
    found = [token for token in tokens(f"- {quote}") if token.type == "code_inline"]
    if plain(text).strip():
        assert [token.content.strip() for token in found] == [plain(text).strip()]
    else:
        assert quote == "(empty)"


@pytest.mark.parametrize("text", ["- a", "1. a", "1) a", "# a", "> a", "+ a", "=== a", "10. a"])
def test_a_remark_that_begins_like_a_list_or_a_heading_is_neither(text: str) -> None:
    kinds = [token.type for token in tokens(as_markdown(Document(text, (), (Remarks((text,)),))))]
    assert kinds.count("heading_open") == 1
    assert kinds.count("bullet_list_open") == 1
    assert not {"ordered_list_open", "blockquote_open"} & set(kinds)


@pytest.mark.proves("R44", "R46")
def test_a_report_for_a_pull_request_has_intervals_n_and_errors() -> None:
    text = made_report(lambda place, *_: TASK_ERROR if place == 9 else FAIL if place < 3 else PASS).to_markdown()
    assert "| baseline | 66.7% | 29.9% to 92.5% | 9 | 1 | 60.0% |" in text
    assert "| with errors as failures | 60.0% | 26.2% to 87.8% | 10 |" in text
    assert "| baseline | 10 | 9 | 1 | 0 | 0 | 0 |" in text
    assert "<details><summary>Errors: 1 trial</summary>" in text
    assert "- `sample-09` task error" in text


def test_a_comparison_and_a_gate_say_their_verdict_first() -> None:
    report = made_report(
        lambda place, name, _: PASS if name == "a" or place % 3 else FAIL, samples=60, experiments=("a", "b")
    )
    compared = compare(report["a"], report["b"]).to_markdown()
    assert compared.splitlines()[0] == "### support@\u200b1: b against a"
    assert "❌ **passed**: b is worse than a" in compared
    decided = gate(report["b"], {"margin": 0.02}, report["a"]).to_markdown()
    assert "❌ **fail**" in decided
    assert "<summary>Lost: 20 samples, the first 10 shown</summary>" in decided
    assert "- and 10 more" in decided


def test_a_hostile_comparison_is_text_too() -> None:
    report = hostile_report(samples=40)
    first, second = report.experiments
    for said in (compare(report[first], report[second], slice_by="topic"), gate(report[first], {"min_pass_rate": 0.5})):
        text = said.to_markdown()
        assert not {"link_open", "image", "html_inline"} & {token.type for token in tokens(text)}
        assert not LINKS.search(spoken(text))


def test_tones_have_signs_and_empty_parts_leave_nothing() -> None:
    table = Table("", (Column("a"), Column("bar", bar=True)), ((Cell("1", "good"), None),))
    text = as_markdown(Document("t", (), (table, Remarks(()), Conclusion("w", HOSTILE, "unsure"), Table("no", (), ()))))
    assert "| ✅ 1 |" in text
    assert "bar" not in text.split("❔")[0]
    assert "**no**" not in text
