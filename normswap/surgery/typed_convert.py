"""`convert` for editors and type checkers, which read the options of each scheme in the stub beside this file."""

from normswap.surgery.conversion import convert as convert
