"""Ship: the folded network as one file, run in its own runtime before it gets its name. Imports: `analysis` and below."""
