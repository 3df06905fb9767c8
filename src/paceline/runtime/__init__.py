"""What a training script uses. Read it in this order: `session` (what opens and closes; `start` is
one without a `with` block), `run` (what the script works with), `loop` (its steps); `settings` has
what all of them are told.

This file imports nothing, so that `identity` works without torch.
"""
