"""The durable truth about runs."""
