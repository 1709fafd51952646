"""What the processes of a job tell each other before they act."""
