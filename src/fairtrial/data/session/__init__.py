"""The typed record of what happened in a trial."""

from fairtrial.data.session.dispatcher import ControlDispatcher
from fairtrial.data.session.events import PromptExecuted, Retrieved, SpanClosed, TokenUsage, ToolInvoked
from fairtrial.data.session.session import Session
from fairtrial.data.session.snapshot import restore_session
from fairtrial.data.session.trajectory import ChatMessage, ToolCall, Trajectory
from fairtrial.data.session.views import Envelope, SessionView, SliceView

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
