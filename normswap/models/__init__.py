"""From a name to a network: timm, other libraries, factories, directories, weights files; and what a network takes.

Enters: whatever opens, builds, or identifies a network, and reads weights without running them.
Imports: `layers`, `provenance`.
"""
