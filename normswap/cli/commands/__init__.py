"""One file per command: what it is called, its options, what it does, and what it prints.

Enters: a file with `ORDER` (its place in --help) and `register(app)`; `app` finds it by walking this folder.
Imports: anything but another command; torch, and what imports it, only inside functions, for --help's sake.
"""
