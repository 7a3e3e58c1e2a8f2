"""The command line: `app` finds the files of `commands`; what they share is beside it."""
