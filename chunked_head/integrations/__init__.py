"""What other libraries call their heads and losses, on top of this one: each module imports its library when used."""
