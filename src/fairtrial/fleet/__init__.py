"""Trials over mailboxes: loops that execute and score them, and what submits and collects."""
