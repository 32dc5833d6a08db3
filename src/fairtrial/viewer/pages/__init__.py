"""The pages of the viewer, one module each: functions from a request to an answer."""
