"""From the model to the optimizer step: wrapping, precision, accumulation and gradients."""
