"""Render a document as one self-contained web page, or as an HTML fragment for a notebook.

Everything is escaped, and a content security policy stands behind the escaping: no fonts, no frames, no requests;
pictures are part of the page, and its one style sheet and one script are allowed by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import html
import io
from collections.abc import Callable, Iterator
from typing import IO

from fairtrial.reports.render import document as doc
from fairtrial.reports.render.plots import STYLE as PLOT_STYLE
from fairtrial.reports.render.safe_text import lines, plain

_LIMIT = 4_000

_STYLE = """
.ft{--ink:#1f2328;--muted:#59636e;--rule:#d1d9e0;--paper:#ffffff;--soft:#f6f8fa;--blue:#0969da;--good:#1a7f37;
--bad:#cf222e;--unsure:#9a6700;color:var(--ink);background:var(--paper);
font:14px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
@media (prefers-color-scheme:dark){.ft{--ink:#e6edf3;--muted:#9198a1;--rule:#3d444d;--paper:#0d1117;--soft:#151b23;
--blue:#4493f8;--good:#3fb950;--bad:#f85149;--unsure:#d29922}}
body.ft{margin:0}.ft main{max-width:1240px;margin:0 auto;padding:24px 20px 60px}
.ft h1{font-size:22px;line-height:1.3;margin:0 0 6px;overflow-wrap:anywhere}
.ft .title{font-size:17px;font-weight:600}
.ft h2{font-size:15px;margin:30px 0 8px;overflow-wrap:anywhere}
.ft p{margin:2px 0;overflow-wrap:anywhere}.ft .about{color:var(--muted)}
.ft .scroll{overflow-x:auto;margin-top:18px}.ft h2+.scroll{margin-top:0}
.ft table{border-collapse:collapse;font-variant-numeric:tabular-nums;background:none;margin:0}
.ft th,.ft td{padding:5px 14px 5px 0;border-bottom:1px solid var(--rule);text-align:right;white-space:nowrap;
background:none;color:inherit;font-size:14px}
.ft thead th{color:var(--muted);font-weight:500;vertical-align:bottom}
.ft .left{text-align:left}.ft td.name,.ft th.name{max-width:320px;overflow:hidden;text-overflow:ellipsis}
.ft tbody th{font-weight:400}.ft tr.section th{font-weight:600;padding-top:14px}
.ft tr.section~tr:not(.section) th.name{padding-left:14px}
.ft svg.bar{display:block;width:180px;height:14px}
.ft svg.bar .track{stroke:var(--rule)}.ft svg.bar .span{stroke:var(--blue);stroke-width:2}
.ft svg.bar .dot{fill:var(--blue)}.ft svg.bar .mark{stroke:var(--muted);stroke-dasharray:2 2}
.ft .good{color:var(--good)}.ft .bad{color:var(--bad)}.ft .unsure{color:var(--unsure)}.ft .dim{color:var(--muted)}
.ft .verdict{margin:20px 0;padding:10px 14px;background:var(--soft);border-left:4px solid var(--muted)}
.ft .verdict.good{border-color:var(--good)}.ft .verdict.bad{border-color:var(--bad)}
.ft .verdict.unsure{border-color:var(--unsure)}.ft .verdict span{color:var(--ink)}
.ft ul{margin:16px 0;padding-left:20px}.ft figure{margin:0}
.ft details{border-bottom:1px solid var(--rule)}.ft summary{padding:6px 0;cursor:pointer;overflow-wrap:anywhere}
.ft dl{margin:0 0 10px 18px}.ft dt{color:var(--muted)}.ft dd{margin:0 0 6px}
.ft pre{margin:0;padding:8px 10px;background:var(--soft);white-space:pre-wrap;overflow-wrap:anywhere;
font:13px/1.45 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;color:inherit}
.ft h2.part{font-size:19px;margin-top:48px;padding-top:14px;border-top:2px solid var(--rule)}
.ft figure{overflow-x:auto}.ft .scroll,.ft figure{background:
linear-gradient(to right,var(--paper) 40%,transparent) 0 0/40px 100% no-repeat local,
linear-gradient(to left,var(--paper) 40%,transparent) 100% 0/40px 100% no-repeat local,
linear-gradient(to right,var(--rule),transparent) 0 0/12px 100% no-repeat scroll,
linear-gradient(to left,var(--rule),transparent) 100% 0/12px 100% no-repeat scroll}
.ft img{display:block;max-width:100%;max-height:420px;box-sizing:border-box;border:1px solid var(--rule);
background:repeating-conic-gradient(#fff 0 25%,#e7e7e7 0 50%) 0 0/16px 16px}
.ft .filter{position:sticky;top:0;background:var(--paper);padding:8px 0;border-bottom:1px solid var(--rule);
display:flex;flex-wrap:wrap;gap:8px;align-items:center}.ft .filter[hidden],.ft .trial[hidden]{display:none}
.ft .filter input,.ft .filter select{font:inherit;color:inherit;background:var(--soft);border:1px solid var(--rule);
border-radius:6px;padding:4px 8px;max-width:100%}.ft .filter input{flex:1 1 200px;min-width:0}
.ft .trial summary{display:grid;grid-template-columns:100px minmax(90px,170px) 1fr 1fr;gap:14px;align-items:baseline}
.ft .trial summary>*{overflow:hidden;text-overflow:ellipsis;white-space:nowrap}
.ft .trial[open]>summary{font-weight:600}.ft .trial .seen{color:var(--muted);font-weight:400}
.ft .trial dl details{border:0}.ft .trial dl summary{display:block;color:var(--muted);padding:0 0 4px}
.ft .pair{display:grid;grid-template-columns:1fr 1fr;gap:0 14px}.ft .pair>div{min-width:0}
.ft table.worst{table-layout:fixed;width:100%}.ft .worst thead th:first-child{width:170px}
.ft .worst th,.ft .worst td{white-space:normal;overflow-wrap:anywhere;vertical-align:top;border:0;padding-top:2px;
padding-bottom:2px}.ft .worst tbody th{color:var(--muted)}
.ft .worst .why th{color:inherit;border-top:1px solid var(--rule);padding-top:5px}
.ft .worst div{display:-webkit-box;-webkit-box-orient:vertical;-webkit-line-clamp:2;overflow:hidden}
.ft details.more{margin-top:22px;border-top:1px solid var(--rule)}
.ft .more>summary{font-size:15px;font-weight:600;padding:10px 0}
.ft .parts{columns:2 520px;column-gap:40px;padding-bottom:20px}.ft .part{break-inside:avoid}
.ft .part>h2{margin-top:18px}.ft .parts svg.bar{width:120px}
@media print{.ft .more:not([open])::details-content{content-visibility:visible;block-size:auto}
.ft .worst div{-webkit-line-clamp:none;display:block}.ft .filter{display:none}}
@media (max-width:640px){.ft main{padding:16px 12px 40px}.ft .ft-plot{min-width:620px}
.ft .trial summary{grid-template-columns:auto 1fr;gap:2px 10px}.ft .trial .seen{grid-column:1/-1}
.ft .pair{grid-template-columns:1fr}.ft dl{margin-left:0}
.ft .worst thead{position:absolute;clip-path:inset(50%)}.ft .worst tr,.ft .worst td,.ft .worst th{display:block}
.ft .worst td:last-child{border-left:3px solid var(--rule);padding-left:8px;margin-bottom:6px}}
"""
_SHEET = _STYLE + PLOT_STYLE
_PAGE_SHEET = "html{color-scheme:light dark}" + _SHEET  # Pages only: a notebook sets its own background.
_HASH = base64.b64encode(hashlib.sha256(_PAGE_SHEET.encode()).digest()).decode()
SCRIPT = """
(function () {
  function reachable() {
    Array.prototype.forEach.call(document.querySelectorAll(".scroll, figure"), function (box) {
      if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
    });
  }
  document.addEventListener("toggle", reachable, true);
  window.addEventListener("resize", reachable);
  reachable();
  var box = document.querySelector(".filter");
  var trials = Array.prototype.slice.call(document.querySelectorAll("details.trial"));
  if (!box || !trials.length) return;
  var words = box.querySelector("input"), picks = Array.prototype.slice.call(box.querySelectorAll("select"));
  var count = box.querySelector("output"), texts = [];
  function matches(trial, at, wanted) {
    for (var one = 0; one < picks.length; one++)
      if (picks[one].value && trial.getAttribute("data-" + picks[one].name) !== picks[one].value) return false;
    if (!wanted.length) return true;
    if (texts[at] === undefined) texts[at] = trial.textContent.toLowerCase();
    return wanted.every(function (word) { return texts[at].indexOf(word) >= 0; });
  }
  function apply() {
    var wanted = words.value.toLowerCase().split(/\\s+/).filter(Boolean), shown = 0;
    trials.forEach(function (trial, at) {
      trial.hidden = !matches(trial, at, wanted);
      if (!trial.hidden) shown++;
    });
    count.textContent = shown + " of " + trials.length;
  }
  words.addEventListener("input", apply);
  picks.forEach(function (pick) { pick.addEventListener("change", apply); });
  trials[0].parentNode.insertBefore(box, trials[0]);
  box.hidden = false;
  apply();
})();
"""
"""Lets the keyboard reach what scrolls; filters trials by result, experiment and words. It only reads the page."""
_SCRIPT_HASH = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
POLICY = (
    f"default-src 'none'; style-src 'sha256-{_HASH}'; script-src 'sha256-{_SCRIPT_HASH}'; img-src data:; "
    "base-uri 'none'; form-action 'none'"
)
"""The content security policy of every page."""


def write_page(document: doc.Document, file: IO[str]) -> None:
    """Write the document as a page; trial details are streamed."""
    title = escaped(document.title)
    file.write(
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(POLICY)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n'
        # Prevents the browser from requesting an icon.
        '<link rel="icon" href="data:,">\n'
        f"<title>{title}</title>\n<style>{_PAGE_SHEET}</style>\n</head>\n"
        f'<body class="ft">\n<main>\n<h1>{title}</h1>\n'
    )
    for part in _inside(document):
        file.write(part)
    if any(isinstance(block, doc.Cases) and block.filter for block in document.blocks) or any(
        isinstance(block, doc.Details) for block in document.blocks
    ):
        file.write(f"<script>{SCRIPT}</script>\n")
    file.write("</main>\n</body>\n</html>\n")


def as_page(document: doc.Document) -> str:
    """Return the document as a page."""
    buffer = io.StringIO()
    write_page(document, buffer)
    return buffer.getvalue()


def as_fragment(document: doc.Document) -> str:
    """Return the document as an HTML fragment for notebooks: with its style, without trial details."""
    kept = doc.Document(
        document.title, document.about, tuple(block for block in document.blocks if not isinstance(block, doc.Cases))
    )
    inside = "".join(_inside(kept))
    return f'<div class="ft"><style>{_SHEET}</style><p class="title">{escaped(document.title)}</p>\n{inside}</div>'


def document_parts(document: doc.Document) -> Iterator[str]:
    """Yield the document as HTML for a page that has its own title and the style of `page_style()`."""
    yield from _inside(document)


def page_style() -> str:
    """Return the style sheet of documents."""
    return _PAGE_SHEET


def escaped(text: str, limit: int = _LIMIT) -> str:
    """Escape text, on one line, for HTML elements and quoted attributes."""
    return html.escape(plain(text, limit=limit))


def _inside(document: doc.Document) -> Iterator[str]:
    for line in document.about:
        yield f'<p class="about">{escaped(line)}</p>\n'
    for block in document.blocks:
        yield from _block(block)


def _block(block: doc.Block) -> Iterator[str]:
    match block:
        case doc.Table():
            yield from _table(block)
        case doc.Conclusion():
            yield (
                f'<p class="verdict {block.tone}"><strong>{escaped(block.word)}:</strong> '
                f"<span>{escaped(block.text)}</span></p>\n"
            )
        case doc.Remarks():
            if block.lines:
                yield "<ul>\n" + "".join(f"<li>{escaped(line)}</li>\n" for line in block.lines) + "</ul>\n"
        case doc.Passage():
            yield f"<h2>{escaped(block.caption)}</h2>\n{_pre(block.text, limit=None)}\n"
        case doc.Plot():
            yield f"<h2>{escaped(block.caption)}</h2>\n<figure>{block.svg}</figure>\n"
        case doc.Cases():
            yield from _cases(block)
        case doc.TrialGroups():
            yield from trial_groups(block)
        case doc.Details():
            yield f'<details class="more"><summary>{escaped(block.title)}</summary>\n<div class="parts">\n'
            for part in block.blocks:
                yield from _part(part)
            yield "</div></details>\n"
        case doc.Heading():
            yield f'<h2 class="part">{escaped(block.title)}</h2>\n'
            yield from (f'<p class="about">{escaped(line)}</p>\n' for line in block.about)


def _part(block: doc.Block) -> Iterator[str]:
    """Yield a block of the details, beside others where there is room."""
    inside = "".join(_block(block))
    if inside:
        yield f'<div class="part">\n{inside}</div>\n'


def trial_groups(
    block: doc.TrialGroups, address: Callable[[doc.TrialExample], str | None] | None = None
) -> Iterator[str]:
    """Yield the worst trials by reason; `address` links each to its page."""
    if not block.groups:
        return
    yield '<h2>Worst trials</h2>\n<table class="worst">\n<thead><tr>'
    yield "".join(f'<th scope="col" class="left">{title}</th>' for title in ("trial", "input", "output"))
    yield "</tr></thead>\n"
    for group in block.groups:
        result, _, reason = group.title.partition(": ")
        because = f": {escaped(reason)}" if reason else ""
        yield (
            '<tbody><tr class="why"><th class="left" scope="rowgroup" colspan="3">'
            f'<span class="{group.tone}">{escaped(result)}</span>{because}</th></tr>\n'
        )
        for one in group.examples:
            to = None if address is None else address(one)
            name = escaped(one.title) if to is None else f'<a href="{html.escape(to)}">{escaped(one.title)}</a>'
            texts = "".join(f'<td class="left"><div>{escaped(text)}</div></td>' for text in (one.input, one.output))
            yield f'<tr><th class="left" scope="row">{name}</th>{texts}</tr>\n'
        yield "</tbody>\n"
    yield "</table>\n"
    if block.others:
        yield f'<p class="dim">{block.others:,} more failed or ended in an error.</p>\n'


def _table(table: doc.Table) -> Iterator[str]:
    if not table.rows:
        return
    if table.caption:
        yield f"<h2>{escaped(table.caption)}</h2>\n"
    # A heading without words tells a screen reader nothing.
    titles = "".join(
        f'<th scope="col"{_kind(column)}>{escaped(column.title)}</th>' if column.title else "<td></td>"
        for column in table.columns
    )
    yield f'<div class="scroll"><table>\n<thead><tr>{titles}</tr></thead>\n<tbody>\n'
    for row in table.rows:
        if isinstance(row, doc.Section):
            yield (
                f'<tr class="section"><th class="left name" scope="rowgroup" colspan="{len(table.columns)}">'
                f"{escaped(row.title)}</th></tr>\n"
            )
            continue
        cells = "".join(
            _cell(content, column, first=at == 0)
            for at, (content, column) in enumerate(zip(row, table.columns, strict=True))
        )
        yield f"<tr>{cells}</tr>\n"
    yield "</tbody></table></div>\n"


def _kind(column: doc.Column) -> str:
    kinds = [
        name for name, applies in (("left", column.align == "left" or column.bar), ("name", column.name)) if applies
    ]
    return f' class="{" ".join(kinds)}"' if kinds else ""


def _cell(content: doc.Content, column: doc.Column, *, first: bool) -> str:
    text = content.text if isinstance(content, doc.Cell) else content if isinstance(content, str) else ""
    whole = f' title="{escaped(text)}"' if column.name and text else ""
    if isinstance(content, doc.Bar):
        inside = bar_svg(content)
    elif isinstance(content, doc.Cell) and content.tone:
        inside = f'<span class="{content.tone}">{escaped(text)}</span>'
    else:
        inside = escaped(text)
    heads = first and bool(text)
    tag = 'th scope="row"' if heads else "td"
    return f"<{tag}{_kind(column)}{whole}>{inside}</{'th' if heads else 'td'}>"


def bar_svg(bar: doc.Bar) -> str:
    """Draw an interval; hidden from screen readers, because the numbers are in the table."""
    low, mean, high = (round(5 + 170 * bar.place(value), 1) for value in (bar.low, bar.mean, bar.high))
    mark = ""
    if bar.mark is not None:
        x = round(5 + 170 * bar.place(bar.mark), 1)
        mark = f'<line class="mark" x1="{x}" x2="{x}" y1="0" y2="14"/>'
    return (
        '<svg class="bar" viewBox="0 0 180 14" aria-hidden="true"><line class="track" x1="5" x2="175" y1="7" y2="7"/>'
        f'{mark}<line class="span" x1="{low}" x2="{high}" y1="7" y2="7"/>'
        f'<line class="span" x1="{low}" x2="{low}" y1="3" y2="11"/>'
        f'<line class="span" x1="{high}" x2="{high}" y1="3" y2="11"/>'
        f'<circle class="dot" cx="{mean}" cy="7" r="3.5"/></svg>'
    )


def _cases(block: doc.Cases) -> Iterator[str]:
    if not block.total:
        return
    yield f"<h2>{escaped(block.caption)}</h2>\n"
    results: dict[str, None] = {}
    experiments: dict[str, None] = {}
    written = 0
    for case in block.items:
        written += 1
        results.setdefault(case.result)
        experiments.setdefault(case.experiment)
        yield _case(case)
    if block.filter:
        # After the trials, which name its choices as they come; hidden until the script moves it before them.
        yield _filter(list(results), list(experiments))
    if written < block.total:
        others = f" {escaped(block.others)}" if block.others else ""
        yield f'<p class="dim">{block.total - written:,} more are not shown here.{others}</p>\n'


def _filter(results: list[str], experiments: list[str]) -> str:
    picks = "".join(
        f'<select name="{name}" aria-label="{name}"><option value="">{title}</option>'
        + "".join(f'<option value="{escaped(one)}">{escaped(one, limit=60)}</option>' for one in values)
        + "</select>"
        for name, title, values in (
            ("result", "every result", results),
            ("experiment", "every experiment", experiments),
        )
        if len(values) > 1
    )
    return (
        '<div class="filter" hidden><input type="search" placeholder="search inputs, outputs, sessions, metadata" '
        f'aria-label="search">{picks}<output></output></div>\n'
    )


def _case(case: doc.TrialDetails) -> str:
    facts = dict(case.facts)
    together = [label for label in ("expected", "output") if label in facts] if case.glance else []
    pair = "".join(f"<div>{_fact(label, facts[label])}</div>" for label in together)
    inside = "".join(
        f'<div class="pair">{pair}</div>' if [label] == together[:1] else _fact(label, text)
        for label, text in case.facts
        if label not in together[1:]
    )
    inside += "".join(
        f"<dt></dt><dd><details><summary>{escaped(label)}</summary>{_pre(text, limit=None)}</details></dd>"
        for label, text in case.folded
    )
    inside += "".join(map(_picture, case.pictures))
    head = f'<span class="{case.tone}">{escaped(case.outcome)}</span> <span>{escaped(case.title)}</span>'
    if case.glance is None:
        return f"<details><summary>{head}</summary><dl>{inside}</dl></details>\n"
    seen = "".join(f' <span class="seen">{escaped(text)}</span>' for text in case.glance)
    return (
        f'<details class="trial" data-result="{escaped(case.result)}" data-experiment="{escaped(case.experiment)}">'
        f"<summary>{head}{seen}</summary><dl>{inside}</dl></details>\n"
    )


def _picture(picture: doc.PictureFact) -> str:
    problem = f' <span class="unsure">{escaped(picture.problem)}</span>' if picture.problem else ""
    image = ""
    if picture.content:
        data = base64.b64encode(picture.content).decode()
        image = f'<img alt="{escaped(picture.name, 80)}" src="data:{escaped(picture.media_type)};base64,{data}">'
    return f"<dt>picture {escaped(picture.name, 80)}{problem}</dt><dd>{image}</dd>"


def _fact(label: str, text: str) -> str:
    return f"<dt>{escaped(label)}</dt><dd>{_pre(text)}</dd>"


def _pre(text: str, *, limit: int | None = _LIMIT) -> str:
    return f"<pre>{html.escape(lines(text, limit=limit)) or ' '}</pre>"
