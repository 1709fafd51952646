"""Which strategy and which sequences go where: costs, candidates, dispatch and packing (pure planning)."""
