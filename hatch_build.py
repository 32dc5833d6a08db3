"""The README as an index shows it: links that lead into this repository, as it was at the version."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

REPOSITORY = "fairtrial/fairtrial"


class Readme(MetadataHookInterface):
    """Hatchling calls it when it builds."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the description."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        at = f"v{metadata['version']}"
        text = re.sub(r"(!\[[^]]*\]\()(?!\w+:|#)", rf"\1https://raw.githubusercontent.com/{REPOSITORY}/{at}/", text)
        text = re.sub(r"(\]\()(?!\w+:|#)", rf"\1https://github.com/{REPOSITORY}/blob/{at}/", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
