"""SAY: how affine maps move through the graph, as edits, an outcome for every norm, and reasons.

Enters: rules of what can pass what, and which layer absorbs which. No module is touched. Imports: `graph` and below.
"""
