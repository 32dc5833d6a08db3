"""The formats of `fairtrial export` that other servers understand: OTLP and LangSmith's experiments."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from fairtrial.cli.user_errors import UserError

if TYPE_CHECKING:
    from fairtrial.store.protocol import RunRecord, RunStore

FORMATS = ("otlp", "langsmith")


@dataclass(frozen=True, slots=True)
class TraceExportOptions:
    """The options of `export` that concern these formats."""

    to: str | None
    content: bool
    profile: str | None
    max_rows: int | None

    def check(self, format_name: str) -> None:
        """Refuse options that the format does not have."""
        if format_name not in FORMATS and (self.to is not None or self.content):
            raise UserError(
                "--to and --trace-content need --format otlp or langsmith", "add --format otlp or --format langsmith"
            )
        if format_name != "otlp" and self.profile is not None:
            raise UserError("--trace-profile needs --format otlp", "add --format otlp")
        if format_name != "langsmith" and self.max_rows is not None:
            raise UserError("--max-rows needs --format langsmith", "add --format langsmith")

    def write(self, store: RunStore, run: RunRecord, target: Path | TextIO, format_name: str) -> None:
        """Write the run to a file."""
        if format_name == "otlp":
            from fairtrial.integrations.tracing.stored import write_run

            write_run(store, run, target, content=self.content, profile=self.profile)
        else:
            from fairtrial.integrations.tracing.langsmith_upload import write_experiments

            write_experiments(store, run, target, content=self.content, **self._rows())

    def send(self, store: RunStore, run: RunRecord, format_name: str, json: bool) -> int:
        """Send the run to a server and say what it took; returns the exit code."""
        from fairtrial.errors import TraceSendError
        from fairtrial.store.redact import current

        try:
            return self._send_spans(store, run, json) if format_name == "otlp" else self._upload(store, run, json)
        except TraceSendError as error:
            remedy = "check the address and OTEL_EXPORTER_OTLP_HEADERS"
            if format_name == "langsmith":
                remedy = "check the address and LANGSMITH_API_KEY; the same command continues the upload"
            raise UserError(current().text(str(error)), remedy) from None

    def _send_spans(self, store: RunStore, run: RunRecord, json: bool) -> int:
        from fairtrial.base.formatting import count
        from fairtrial.cli.screen import note, print_json
        from fairtrial.integrations.tracing.stored import send_run

        totals = send_run(store, run, self.to or "", content=self.content, profile=self.profile)
        if json:
            facts = {"trials": totals.trials, "spans": totals.spans, "logs": totals.logs, "rejected": totals.rejected}
            print_json({"format": "fairtrial.traces/1", "run_id": run.run_id, "to": self._shown_address, **facts})
        else:
            rejected = f"; the server rejected {totals.rejected:,}: {totals.remark}" if totals.rejected else ""
            logs = count(totals.logs, "evaluation result")
            if not totals.takes_logs:
                logs = "scores in their attributes only, as the server takes no log records"
            trials, spans = count(totals.trials, "trial"), count(totals.spans, "span")
            note(f"sent {trials} to {self._shown_address}: {spans}, {logs}{rejected}")
        return 1 if totals.rejected else 0

    def _upload(self, store: RunStore, run: RunRecord, json: bool) -> int:
        from fairtrial.base.formatting import count
        from fairtrial.cli.screen import note, print_json
        from fairtrial.integrations.tracing.langsmith_upload import upload_run

        totals = upload_run(store, run, self.to or "", content=self.content, **self._rows())
        if json:
            facts = {"created": totals.created, "existing": totals.existing, "unconfirmed": totals.unconfirmed}
            print_json(
                {"format": "fairtrial.upload/1", "run_id": run.run_id, "to": self._shown_address,
                 **facts, "trials": totals.trials}
            )  # fmt: skip
            return 0
        text = f"{count(totals.created, 'experiment')} with {count(totals.trials, 'trial')} created"
        if totals.existing:
            text += f", {totals.existing:,} existed already"
        note(f"uploaded to {self._shown_address}: {text}")
        if totals.unconfirmed:
            name = count(totals.unconfirmed, "experiment")
            note(f"{name} came to exist in an attempt that the server did not answer: compare the number of rows there")
        return 0

    @property
    def _shown_address(self) -> str:
        from fairtrial.store.redact import current

        return current().text(self.to or "")

    def _rows(self) -> dict[str, Any]:
        return {} if self.max_rows is None else {"max_rows": self.max_rows}
