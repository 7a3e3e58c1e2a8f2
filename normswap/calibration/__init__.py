"""Values from data: population statistics, least squares, and the order of fitting layers."""
