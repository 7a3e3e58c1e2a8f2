"""From a name to a network, and what a network takes.

Names are those of timm, of other libraries, of factories, directories and weights files.
"""
