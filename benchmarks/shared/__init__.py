"""What several of the benchmarks use: steps to take, and tables."""
