"""Folders and tars of images with labels; accuracy on them, and how often two networks agree."""
