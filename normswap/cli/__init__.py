"""The command line: `app` finds the files of `commands`; what they share is beside it. typer and rich live only here.

Imports: anything.
"""
