"""What a call over several ranks knows of the others, and is to each of them."""
