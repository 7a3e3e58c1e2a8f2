"""What a module is: decided here once, and written down as a `Site`.

Every norm, affine map, activation and linear layer with a forward of its own, of torch or of any
other library, is recognized in this room and nowhere else.
"""
