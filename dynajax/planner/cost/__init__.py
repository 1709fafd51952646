"""What a plan costs: seconds on a topology, rounds of messages, and the collectives that its messages amount to."""
