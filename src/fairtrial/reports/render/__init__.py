"""Show anything in terminals, Markdown, HTML, JSON and JUnit.

What can be shown is a `Renderable` and gives its own `Document`; `terminal`, `markdown` and `html` each show any
document. `files` writes them, `plots` has the drawings, `safe_text` what makes foreign text safe to show.
"""
