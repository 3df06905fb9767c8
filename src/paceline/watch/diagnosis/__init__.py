"""What is wrong with a run: findings from its folder, each with its evidence."""
