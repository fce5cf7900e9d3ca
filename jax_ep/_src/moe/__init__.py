"""moe_mlp: dispatch, the experts, and combine, as one differentiable function."""
