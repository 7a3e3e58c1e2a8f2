"""SEE: a forward becomes an anatomy of residual blocks, norms with their roles, and channel axes.
Changes nothing.
"""
