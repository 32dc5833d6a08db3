"""Gates: checks of a run against rules, the document, and `gate`."""
