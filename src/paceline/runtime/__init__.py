"""What a training script uses. This file imports nothing, so that `identity` works without
torch.
"""
