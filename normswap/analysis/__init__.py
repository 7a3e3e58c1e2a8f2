"""Views of a network as data: signal propagation, weight decay groups, summaries and advice."""
