"""Samples, datasets, attachments and sessions."""

from fairtrial.data.attachment import Attachment, BlobFolder
from fairtrial.data.dataset import Dataset, load_jsonl
from fairtrial.data.sample import Sample

__all__ = ["Attachment", "BlobFolder", "Dataset", "Sample", "load_jsonl"]
