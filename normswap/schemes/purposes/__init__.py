"""The purposes of `--for`, one file each: a step of the plan after the scheme's."""
