"""Flax models whose every parameter names its logical axes."""
