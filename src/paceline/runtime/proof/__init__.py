"""What ranks record for `paceline prove`, when the variable PACELINE_PROOF is set."""
