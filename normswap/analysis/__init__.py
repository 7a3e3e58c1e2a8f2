"""The views of a network, as data: signal propagation, decay groups, summaries, advice, and its
plots.
"""
