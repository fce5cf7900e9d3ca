"""Eight-bit formats, and what is quantized: rows, weights and recipes."""
