"""The troubles of BatchNorms: found, named, and what mends them."""
