"""The rooms of the package, from the ground up."""

ORDER = (
    ("errors", "copying", "version", "shipped"),
    ("reading",),
    ("plan", "plugins"),
    ("provenance",),
    ("layers",),
    ("models",),
    ("graph",),
    ("images",),
    ("folding",),
    ("calibration",),
    ("schemes",),
    ("surgery",),
    ("storage",),
    ("analysis",),
    ("diagnosis",),
    ("training", "exporting", "benchmarking", "reporting"),
    ("cli",),
)


FLOOR = {room: floor for floor, rooms in enumerate(ORDER) for room in rooms}
