"""Carry out moves by copies in the memory of the host, between CPU devices of one process."""
