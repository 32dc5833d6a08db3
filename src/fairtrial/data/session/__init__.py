"""The typed record of what happened in a trial."""

from fairtrial.data.session.events import PromptExecuted, Retrieved, SpanClosed, TokenUsage, ToolInvoked
from fairtrial.data.session.session import ControlDispatcher, Session, restore_session
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
