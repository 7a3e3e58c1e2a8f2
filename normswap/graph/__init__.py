"""SEE: a forward becomes an anatomy of residual blocks, norms with their roles, and channel axes. Changes nothing.

Enters: the record and questions that a graph alone can answer. The ways to change it are `folding`'s.
Imports: `layers`, `models`.
"""
