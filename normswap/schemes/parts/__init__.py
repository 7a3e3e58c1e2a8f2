"""What several schemes share: scalars on branches, norms in seats, standardized filters."""
