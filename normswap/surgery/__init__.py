"""DO and PROVE: apply a plan to a copy, fit it, and compare it with its source.

DO: `network` (the record that all work on), `applying`, `carrying_out` (one step: apply, fit,
prove, record), `conversion` (all steps), `recalibration`, `likeness`, and the way back,
`unfolding`. PROVE, which changes no network: `running`, `comparison`, `departure`, `report`,
`held_out`, `reverification`.
"""
