"""The trials of one run in several processes of this machine, without a queue."""
