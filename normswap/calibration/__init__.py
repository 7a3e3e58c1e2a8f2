"""Values from data: population statistics, least squares, and the order in which layers are fitted."""
