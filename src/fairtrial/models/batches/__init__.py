"""Batches of model calls at providers: sent once at half price, answered within a day, and safe from crashes."""

from fairtrial.models.batches.batching import Batching

__all__ = ["Batching"]
