"""The command line, one file per command. Only here are typer and rich. Imports: anything."""
