"""`python -m greenroom`: the command line."""

from greenroom.cli import main

main()
