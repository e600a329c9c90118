"""Code that several benchmarks share: workloads, variants and tables."""
