"""`python -m fairtrial.cli`: the same as `fairtrial`, where scripts are not on the path."""

from fairtrial.cli import main

main()
