"""The page about a conversion, and the demo: facts, charts, HTML.

Imports: `analysis` and what is below.
"""
