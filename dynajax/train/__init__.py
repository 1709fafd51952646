"""The training loop that switches strategies while it runs."""
