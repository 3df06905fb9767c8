"""What both halves know of a sweep: its folder, and the Optuna study that its trials share."""
