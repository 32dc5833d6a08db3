"""Texts that attack a page, and a store in which every text is one of them."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

from fairtrial import (
    Attachment,
    ChatMessage,
    EvalResult,
    Label,
    Metric,
    Sample,
    Score,
    Session,
    TokenUsage,
    ToolCall,
    TrialKey,
)
from fairtrial.data.pictures import PICTURES
from fairtrial.data.session.events import PromptExecuted, ToolInvoked
from fairtrial.store import RunRecord, RunStore, open_store
from fairtrial.store.notes import ReviewNote, write_notes
from tests.viewer.conftest import record
from tests.viewer.pictures import HTML, POLYGLOT, SVG, png
from tests.viewer.searches import add_search

AWAY = "http://127.0.0.1:9/"
_BREAKOUTS = ("", '">', "'>", "</pre>", "</title>", "</textarea>", "</script>", "--><!-- ", "]]>", "</option></select>")
_ELEMENTS = (
    "<script>hit=1</script>",
    "<img src=x onerror=hit=1>",
    f"<img src={AWAY}a.png>",
    "<svg/onload=hit=1>",
    "<iframe srcdoc='<script>parent.hit=1</script>'></iframe>",
    f"<link rel=stylesheet href={AWAY}b.css>",
    "<details open ontoggle=hit=1>",
    "<button autofocus onfocus=hit=1>",
)
_OTHERS = (
    '" onmouseover="hit=1', "' autofocus onfocus='hit=1", " onload=hit=1 ", "javascript:hit=1", "JaVaScRiPt:hit=1",
    "java\tscript:hit=1", "data:text/html,<script>parent.hit=1</script>", "vbscript:hit=1",
    "[a](javascript:hit=1)", "[a](JAVASCRIPT:hit=1)", "[a](data:text/html;base64,PHNjcmlwdD4=)", f"![a]({AWAY}c.png)",
    f"<{AWAY}d>", f"[x]: {AWAY}e\n\n![x]", "[a](http://a' onmouseover='hit=1)", '[a](http://a" onmouseover="hit=1)',
    "<a href=javascript:hit=1>x</a>", f"<base href={AWAY}>", f"<meta http-equiv=refresh content='0;url={AWAY}'>",
    f"<form action={AWAY}><input type=submit autofocus>", "<style>@import url(http://127.0.0.1:9/f.css)</style>",
    f"<object data={AWAY}>", f"<embed src={AWAY}>", f"<video src={AWAY} autoplay>", f"<audio src={AWAY} autoplay>",
    "<math><mtext></mtext><mglyph><svg><mtext><style><img src=x onerror=hit=1></style>",
    "<noscript><p title='</noscript><img src=x onerror=hit=1>'>", "<template><script>hit=1</script></template>",
    "{{ 7 * 7 }}", "{% for x in [1] %}{{ self.__init__.__globals__ }}{% endfor %}", "${hit=1}", "<%= 7 * 7 %>",
    "\u202e<b>x", "\u2028<script>hit=1</script>", "\x00<script>hit=1</script>", "\x1b]8;;javascript:hit=1\x07x",
    "&lt;script&gt;hit=1&lt;/script&gt;", "&#60;script&#62;hit=1", "\uff1cscript\uff1ehit=1", "%3Cscript%3Ehit=1",
    "\ud800<script>hit=1</script>", "<scr<script>ipt>hit=1</scr</script>ipt>", "<<script>hit=1//<</script>",
)  # fmt: skip
PAYLOADS = tuple(dict.fromkeys([f"{out}{element}" for out, element in product(_BREAKOUTS, _ELEMENTS)] + list(_OTHERS)))
ATTACHED = (
    POLYGLOT, SVG, HTML, b"\xff\xd8\xff<script>hit=1</script>", b"RIFF\0\0\0\0WEBPVP8X<script>hit=1</script>",
    png(2, 2),
)  # fmt: skip
"""The bytes of attachments: with each payload as name and type, and as every kind of picture."""
RUN = "payload-run"


def add_payloads(path: Path) -> RunStore:
    """Make a store in which each text of a run, a trial, a session and a review is each payload once."""
    store = open_store(path)
    _add_trials(store)
    _add_runs(store)
    add_search(store, PAYLOADS[6], PAYLOADS, [0] * len(PAYLOADS), parameter=PAYLOADS[7], error=PAYLOADS[8])
    return store


def _add_trials(store: RunStore) -> None:
    size = len(PAYLOADS)
    for content in ATTACHED:
        store.put_blob(content)
    run = store.create_run(
        record(RUN, PAYLOADS[0], size, experiments=(PAYLOADS[1], PAYLOADS[2]), evaluator=PAYLOADS[3])
    )
    samples: dict[int, Sample[Any, Any]] = {
        0: Sample(f"0/{PAYLOADS[0]}", {text: text for text in PAYLOADS}, list(PAYLOADS), _metadata())
    }
    samples |= {at: Sample(f"{at}/{text}", text, text, {"kind": text}) for at, text in enumerate(PAYLOADS) if at}
    results = [_result(run, run.ordinal(at, side, 0), samples[at]) for at in range(size) for side in (0, 1)]
    store.commit(run.run_id, results, samples)
    review = ReviewNote(
        PAYLOADS[4], "\n".join(PAYLOADS), "\n\n".join(PAYLOADS), run.experiments, "ratings", "07", size, 1,
        ("m.kind", "experiment", "expected", *(f"m.{text}" for text in PAYLOADS)), 1.0, PAYLOADS[5],
    )  # fmt: skip
    store.update_run(run.run_id, status="finished", finished_at=1005.0, notes=write_notes(reviews=(review,)))
    for at, text in enumerate(PAYLOADS):
        key = TrialKey(run.run_id, run.experiments[0], samples[at].id, 0)
        store.label(Label(key, review.name, "good" if at % 2 else "poor", text))
        store.label(Label(key, review.name, "wrong", "ann"))
        store.label(Label(key, f"~comment:{review.name}", text, text))
        store.label(Label(key, f"~picked:{review.name}", text, text))
        for name in ("~comment", "~run-comment"):
            store.label(Label(key, name, {"id": text, "text": text}, text))
        other = TrialKey(run.run_id, run.experiments[1], samples[at].id, 0)
        store.label(Label(other, f"~skip:{review.name}", text, text))


def _metadata() -> dict[str, str]:
    return {"kind": PAYLOADS[0]} | {text: text for text in PAYLOADS}


def _result(run: RunRecord, ordinal: int, sample: Sample[Any, Any]) -> EvalResult:
    place, experiment, _ = run.split(ordinal)
    text = PAYLOADS[place]
    key = TrialKey(run.run_id, run.experiments[experiment], sample.id, 0)
    if place % 7 == 6 and experiment:
        return EvalResult(
            key=key,
            ordinal=ordinal,
            outcome="task_error",
            error=text,
            stage="task",
            metadata={"traceback": text},
            execution=ordinal + 1,
        )
    texts = PAYLOADS if place == 0 else (text,)
    session = Session(tags={})
    for one in texts:
        session.record(ChatMessage("assistant", one, (ToolCall(one, {one: one}, id=one),), one, reasoning=one))
        session.record(ChatMessage(one, one))
        session.record(ChatMessage("user", (one, *(Attachment.of(at, media_type=one, name=one) for at in ATTACHED))))
        pictures = [Attachment.of(at, media_type=kind, name=one) for at in ATTACHED for kind in PICTURES]
        session.record(ToolInvoked(one, {one: one}, pictures, True, duration_ms=5.0))
        session.record(ToolInvoked(one, {one: one}, one, False, error=one, duration_ms=5.0))
        session.record(ToolInvoked(one, {one: one}, {one: one}, True, duration_ms=5.0))
        session.record(PromptExecuted(one, one, one, TokenUsage(1, 1), one, duration_ms=9.0), actor="judge")
        session.record(PromptExecuted(one, one, one, TokenUsage(1, 1), one, duration_ms=9.0))
    metrics = [
        Metric(one, 0.5, passed=False, reason=one, metadata={"judge_model": one, "reply": one, one: one})
        for one in texts
    ]
    score = Score(0.1 * experiment, bool(place % 2 != experiment), text, metrics, name=text)
    return EvalResult(
        key=key,
        ordinal=ordinal,
        outcome="scored",
        score=score,
        output=dict.fromkeys(texts, text) if place == 0 else f"{text} {experiment}",
        metadata={one: one for one in texts},
        execution=ordinal + 1,
        snapshot=session.snapshot(),
    )


def _add_runs(store: RunStore) -> None:
    """Add a run for each payload: the names of suite, dataset, experiment and evaluator, and tags."""
    for at, text in enumerate(PAYLOADS):
        run = store.create_run(
            record(
                f"named-{at}", f"{at} {text}", 1, experiments=(text,), dataset_name=text, evaluator=text,
                tags={text: text}, dataset_version=text, created_at=10.0 + at,
            )
        )  # fmt: skip
        result = EvalResult(
            key=TrialKey(run.run_id, text, text, 0),
            ordinal=0,
            outcome="scored",
            score=Score(1.0, name=text),
            output=text,
            execution=1,
        )
        store.commit(run.run_id, [result], {0: Sample(text, text, text, {text: text})})
        store.update_run(run.run_id, status="finished", finished_at=20.0 + at)
