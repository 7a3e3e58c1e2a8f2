"""An example: a scheme and a norm of somebody else's."""
