"""DO and PROVE: apply a plan to a copy, fit it, compare it with its source; and the way back
(`unfolding`).

DO: `network` (the record that all work on), `applying`, `carrying_out` (a step: apply, fit, prove,
record), `conversion` (all steps), `recalibration`, `likeness`, `unfolding`. PROVE, which changes no
network: `running`, `comparison`, `departure`, `report`, `held_out`, `reverification`.
"""
