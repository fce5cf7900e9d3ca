"""The experts of one rank: two grouped matmuls with an activation between them."""
