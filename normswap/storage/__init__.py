"""The directory that is written: tensors, plan, proof and card; whole, or not at all.

Imports: `surgery` and above.
"""
