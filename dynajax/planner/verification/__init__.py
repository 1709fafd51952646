"""That a plan is right: a proof by bookkeeping, a run of small plans in numpy, bounds that no plan can beat."""
