"""Provider quotas and budgets that the workers of a fleet share through Redis or PostgreSQL."""
