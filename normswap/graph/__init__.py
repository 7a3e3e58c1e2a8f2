"""SEE: a forward becomes an anatomy of residual blocks, norms with their roles, and channel axes.

Nothing in this room changes the network.
"""
