"""How fast each runtime runs a network: checked first, then timed in turns. Imports: `analysis` and
above.
"""
