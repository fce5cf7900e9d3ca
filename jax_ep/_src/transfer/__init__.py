"""dispatch, redispatch and combine: rows between ranks."""
