"""The messages of docs/reference/errors.md, and by topic the calls that produce them."""
