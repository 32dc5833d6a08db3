"""Fakes and fixtures for people who test their own evaluators, tasks and mailboxes."""

from fairtrial.testing.fakes import FakeClock, session_of

__all__ = ["FakeClock", "session_of"]
