"""Run user code in child processes, which are reused, and killed at the time limit.

Children are started as new interpreters: a fork would copy locks that threads of this process hold. The user's script
is not executed again. Callables that a new interpreter can import are sent by name, all others (`__main__`, lambdas,
closures, notebooks) by value; arguments are sent by value, and results are returned as JSON. Pickles are only sent to
the child, through a private socket.
"""

from fairtrial.base.isolation.runner import (
    ChildDiedError,
    Function,
    IsolatedError,
    IsolatedRunner,
    NotSendableError,
    check_sendable,
)

__all__ = ["ChildDiedError", "Function", "IsolatedError", "IsolatedRunner", "NotSendableError", "check_sendable"]
