"""Layers that a plan can put into a network, and what is known of other people's norms.

Enters: layers that are built from what they replace (`replacing`), and what norms, reparametrized weights and
activations of torch, timm or torchvision compute in eval mode. Imports: `errors`, `plan`, `plugins`, `provenance`.
"""
