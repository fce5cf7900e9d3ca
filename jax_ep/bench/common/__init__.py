"""What all benchmarks share: cases, timing, the comparison and its report."""
