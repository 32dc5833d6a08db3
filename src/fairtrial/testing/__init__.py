"""Things to test evaluations with: fakes, fixtures and a local model server.

Nothing here is imported by the rest of Fairtrial, and importing this package needs no extra:
`fairtrial.testing.model_server` asks for `pip install "fairtrial[testing]"` only when a server is made.
"""
