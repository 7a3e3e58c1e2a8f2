"""The rooms of the package, from the ground up; those of one line know nothing of each other."""

ORDER = (
    ("errors", "copying", "version", "shipped"),
    ("reading",),
    ("plan", "plugins"),
    ("provenance",),
    ("sites",),
    ("layers",),
    ("models",),
    ("graph",),
    ("images",),
    ("folding",),
    ("calibration",),
    ("schemes",),
    ("proof",),
    ("surgery",),
    ("storage",),
    ("analysis",),
    ("diagnosis",),
    ("training", "exporting", "benchmarking", "reporting"),
    ("cli",),
)


# The number of a room's line in `ORDER`.
FLOOR: dict[str, int] = {}
for number, rooms in enumerate(ORDER):
    FLOOR.update(dict.fromkeys(rooms, number))
