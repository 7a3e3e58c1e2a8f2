"""What `--for` adds to a conversion, one file per purpose: a step of the plan after the scheme's."""
