"""When what is moved: stages within a memory budget, and the bytes alive on every device over them."""
