"""Scripts that know nothing of Paceline."""
