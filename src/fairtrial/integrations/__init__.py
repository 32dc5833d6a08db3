"""Adapters to other frameworks. Each needs the framework itself, which is imported when the adapter is used."""
