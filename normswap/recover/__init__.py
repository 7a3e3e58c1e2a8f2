"""Recover: recipes, and the engine that trains a converted network."""
