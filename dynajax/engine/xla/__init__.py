"""Carry out moves by XLA programs, on any devices of any number of processes."""
