"""The virtual parameter space: what state there is, and who holds which part of it (pure)."""
