"""One viewer for a team: who people are, what they may do in each project, and a record of what they did."""
