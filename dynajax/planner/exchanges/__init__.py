"""What the programs that carry out a plan do: messages, rounds, and who cuts out and puts in place which boxes."""
