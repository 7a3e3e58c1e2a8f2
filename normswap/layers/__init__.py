"""Layers that a plan can put into a network, and what norms and reparametrized weights of others
compute.
"""
