"""DO: apply a plan to a copy, fit it, and let it be proved.

`network` is the record that all work on. `applying` makes the copy, `carrying_out` is one step
(apply, fit, prove, record), `conversion` all steps; `recalibration`, `likeness`, and the way back,
`unfolding`. `verification` and `reverification` prove again what was made before.
"""
