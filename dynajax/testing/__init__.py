"""Independent references for tests: of dynajax, and of code that uses it."""
