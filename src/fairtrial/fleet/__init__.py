"""Distributed runs: clients that submit trials to mailboxes, and workers that execute them.

`client` submits the trials of a run and collects their results, `worker` executes and scores them, `limits` holds the
quotas and budgets that workers share, and `ops` keeps worker processes running and observable. None of the four imports
another: they exchange the types in `messages` through the mailboxes in `queues`. The whole package requires asyncio.

Exported names are imported lazily.
"""

from fairtrial.base.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
