"""What there is to see in a network, as data: signal propagation, decay groups, summaries, advice, and its plots.

Imports: `storage` and what is above.
"""
