"""Ship: the folded network as one file, run in its own runtime before it is named.

Imports: `analysis` and below.
"""
