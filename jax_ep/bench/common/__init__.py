"""Cases, timing, comparison and report of all benchmarks."""
