"""The layers that a plan can place."""
