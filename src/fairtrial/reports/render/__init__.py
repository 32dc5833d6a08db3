"""Render records of `fairtrial.reports.figures` for terminals, Markdown, HTML, JSON and JUnit.

`documents.document_of` puts what a record says into a `Document`; `terminal`, `markdown` and `html` each show any
document. `json_record` is the same for programs, `junit` for CI systems, `plots` the drawings, `safe_text` what makes
foreign text safe to show.
"""
