"""What ranks record for `paceline prove`, when the variable PACELINE_PROBE is set."""
