"""The typed record of what happened in a trial."""

from fairtrial.session.dispatcher import ControlDispatcher
from fairtrial.session.events import PromptExecuted, Retrieved, SpanClosed, TokenUsage, ToolInvoked
from fairtrial.session.session import Session
from fairtrial.session.snapshot import restore_session
from fairtrial.session.trajectory import ChatMessage, ToolCall, Trajectory
from fairtrial.session.views import Envelope, SessionView, SliceView

__all__ = [
    "ChatMessage",
    "ControlDispatcher",
    "Envelope",
    "PromptExecuted",
    "Retrieved",
    "Session",
    "SessionView",
    "SliceView",
    "SpanClosed",
    "TokenUsage",
    "ToolCall",
    "ToolInvoked",
    "Trajectory",
    "restore_session",
]
