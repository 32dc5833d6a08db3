"""Plans: how many samples a question needs, and whether a run kept to its plan."""
