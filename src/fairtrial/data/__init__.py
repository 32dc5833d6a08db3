"""Samples and datasets: what is put to the system under test."""

from fairtrial.data.attachment import Attachment, BlobFolder
from fairtrial.data.dataset import Dataset
from fairtrial.data.loaders import load_jsonl
from fairtrial.data.sample import Sample

__all__ = ["Attachment", "BlobFolder", "Dataset", "Sample", "load_jsonl"]
