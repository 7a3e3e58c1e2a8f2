"""Parts that several schemes share: scalars on branches, norms in other norms' places, standardized filters."""
