"""PROVE: run source and result on the same inputs, measure how far apart they are, and judge.

Nothing here changes a network. `running` runs one for comparison; `distance` is the one measure of
two sets of values; `allowance` says how large a distance rounding explains; `verdict` makes PROVED,
NOT PROVED, WRONG or MEASURED of them; `comparison` does all of that for two networks, `doubles` in
float64, `compiling` for torch.compile; `held_out` measures answers on images, and `where` finds the
first layer that is off. Files (`exporting/checks.py`) are held to the same measure.
"""
