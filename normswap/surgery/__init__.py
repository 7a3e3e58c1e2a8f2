"""DO and PROVE: apply a plan to a copy, fit it, compare it with its source; and the way back (`unfolding`).

Imports: `schemes` and what is above.
"""
