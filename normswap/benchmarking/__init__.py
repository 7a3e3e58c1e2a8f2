"""How fast each runtime runs a network: answers are checked first, then passes timed in turns.

Imports: `analysis` and above.
"""
