"""Samples, datasets, attachments and sessions."""

from fairtrial.data.dataset import Dataset, load_jsonl
from fairtrial.data.sample import Attachment, BlobFolder, Sample

__all__ = ["Attachment", "BlobFolder", "Dataset", "Sample", "load_jsonl"]
