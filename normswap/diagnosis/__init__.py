"""What is wrong with the BatchNorms of a network, and what mends it."""
