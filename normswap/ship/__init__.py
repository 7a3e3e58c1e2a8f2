"""Ship: a network as a file for another runtime (`normswap export`), and how fast each runtime runs it (`bench`)."""
