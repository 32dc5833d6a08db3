"""User code in child processes of its own: fresh interpreters that are reused, and killed when their time is up.

A child is never forked from this process, whose threads may hold locks at that moment, and never runs the user's script
again. Callables travel by name where a fresh interpreter can import them, and by value where it cannot (`__main__`,
lambdas, closures, notebooks); arguments travel by value; results come back as JSON. Pickles pass through a private
socket to a child that this process started, and go nowhere else.
"""

from fairtrial.isolation.runner import ChildDiedError, Function, IsolatedError, IsolatedRunner
from fairtrial.isolation.transfer import NotSendableError, check_sendable

__all__ = ["ChildDiedError", "Function", "IsolatedError", "IsolatedRunner", "NotSendableError", "check_sendable"]
