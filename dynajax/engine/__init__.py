"""Move the bytes of a plan between live arrays."""
