"""Which device plays which rank of the target, where the caller leaves that free."""
