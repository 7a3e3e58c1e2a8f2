"""Recover: recipes, and the engine that trains a converted network.

Imports: `analysis` and what is below.
"""
