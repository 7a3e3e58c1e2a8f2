"""From a name to a network: timm, other libraries, factories, directories, weights files; and what
a network takes.
"""
