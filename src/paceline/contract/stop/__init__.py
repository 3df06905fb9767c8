"""How scripts without the runtime are asked to stop, and how they say that they have saved."""
