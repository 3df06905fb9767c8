"""Record which samples each rank gets, for `paceline inspect data`: `python -m` this package, then
the script.
"""
