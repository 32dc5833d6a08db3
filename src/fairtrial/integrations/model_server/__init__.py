"""A real HTTP model server for tests and demos, on loopback.

It implements OpenAI's chat completions and Responses, Anthropic's messages, Google's `generateContent` and Amazon
Bedrock's `Converse`. It returns configured replies (`Reply`,
`Script`, `Rule`, a function) or echoes the last user message, and injects faults (`FaultRule`) that depend on a seed.
It can also serve batches of OpenAI and Anthropic (`BatchOptions`), and a project of OpenAI's hosted Evals
(`HostedEvals`), for tests of importers.
In this process: `ModelServer`. In another: `spawn_model_server`. From the shell: `python -m` this package.
"""

from fairtrial.base.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
