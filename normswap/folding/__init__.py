"""SAY: how affine maps move through the graph, as edits, an outcome for every norm, and reasons."""
