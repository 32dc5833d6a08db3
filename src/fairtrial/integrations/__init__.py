"""Optional parts: tracing, importers, Inspect, sandboxes and the model server; what they need is imported when used."""
