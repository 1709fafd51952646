"""What arrays of JAX are made of: dtypes, buffers, blocks over devices; and the seam to JAX's private parts."""
