"""Layers that a plan can put into a network, and what is known of other people's norms.

Enters: every layer that a plan can name, each built from what it replaces (`replacing`), and what a norm, a
reparametrized weight or an activation of torch, timm or torchvision computes in eval mode. Nothing here has seen a
network. Imports: `errors`, `plan`, `plugins`, `provenance`.
"""
