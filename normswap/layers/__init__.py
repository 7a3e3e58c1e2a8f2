"""The layers that a plan can place, and what is known of the layers of other libraries."""
