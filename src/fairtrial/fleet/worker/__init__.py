"""Executes and scores trials from a mailbox: the loops, their leases, and where results go."""
