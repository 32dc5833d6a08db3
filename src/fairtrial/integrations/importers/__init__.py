"""Import runs, datasets and graders of other tools: entry points of the group `fairtrial.importers`."""
