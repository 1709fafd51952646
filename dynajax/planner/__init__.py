"""How to get from one layout to another: who sends what to whom, when, and at what price (pure)."""
