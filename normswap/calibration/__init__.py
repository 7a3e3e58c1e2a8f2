"""Values from data: population statistics, least squares, and the order in which layers are fitted.

Enters: whatever sets numbers of a network that has its structure already. Imports: `graph`, `images` and what is below.
"""
