"""SAY: an affine map moved through the graph. A builder of edits, an outcome for every norm, and the reasons.

Enters: rules of what can pass what, and which layer absorbs which. No module is touched. Imports: `graph` and what is
above.
"""
