"""The troubles of BatchNorms: found, named, and what mends them.

Imports: `analysis` and what is below.
"""
