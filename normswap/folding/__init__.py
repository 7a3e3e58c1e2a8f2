"""SAY: an affine map moved through the graph. A draft of edits, an outcome for every norm, and the reasons.

Enters: rules of what can pass what, and who takes in whom. No module is touched. Imports: `graph` and what is above.
"""
