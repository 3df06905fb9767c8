"""`paceline adopt`: what to change in a script so that it trains on several ranks, and why.

`script_analysis` and `value_origins` know what the script says, `training` finds its loops,
loaders, models and optimizers, each of the `rules` makes one kind of change, and `script_changes`
puts them together.
"""
