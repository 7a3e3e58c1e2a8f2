"""Folders and tars of images with labels; accuracy on them, and how often two networks agree.

Imports: `models` and what is below it.
"""
