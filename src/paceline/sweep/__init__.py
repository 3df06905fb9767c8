"""Many runs: search spaces, samplers, arrays, and what came of them."""
