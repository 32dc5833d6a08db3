"""Records of samples that are not the same on all sides. Does not import numpy."""

from __future__ import annotations

from dataclasses import dataclass

from fairtrial.base.formatting import count


@dataclass(frozen=True, slots=True)
class ChangedSamples:
    """Samples that are not the same on all sides, with some ids: another input, or only another expected value."""

    inputs: int
    expected: int
    input_ids: tuple[str, ...]
    expected_ids: tuple[str, ...]

    @property
    def remark(self) -> str:
        """Return a remark about them: which are changed, and that they are missing."""
        said = []
        for changed, what, ids in (
            (self.inputs, "input", self.input_ids),
            (self.expected, "expected value", self.expected_ids),
        ):
            if changed:
                more = f" and {changed - len(ids):,} more" if changed > len(ids) else ""
                said.append(f"the {what} of {count(changed, 'sample')} ({', '.join(ids)}{more})")
        return (
            f"Changed between the sides: {' and '.join(said)}. Changed samples are not paired; they count as missing."
        )
