"""The logger of the fleet, with secrets redacted."""

from __future__ import annotations

import logging

from fairtrial.store.redact import RedactingFilter

log = logging.getLogger("fairtrial.fleet")
log.addFilter(RedactingFilter())
