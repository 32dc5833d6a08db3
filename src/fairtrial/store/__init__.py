"""Storage of runs: SQLite, PostgreSQL or memory. No database driver is imported until a store is opened."""

from fairtrial.store.export import export_results
from fairtrial.store.open import default_store, open_store
from fairtrial.store.portable import load_run, save_run
from fairtrial.store.protocol import Committed, Label, RunRecord, RunStatus, RunStore, Totals
from fairtrial.store.redact import RedactingFilter, Redactor, register_secret

__all__ = [
    "Committed",
    "Label",
    "RedactingFilter",
    "Redactor",
    "RunRecord",
    "RunStatus",
    "RunStore",
    "Totals",
    "default_store",
    "export_results",
    "load_run",
    "open_store",
    "register_secret",
    "save_run",
]
