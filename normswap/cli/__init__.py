"""The command line: `app` runs the commands in `commands`. They share the files beside it."""
