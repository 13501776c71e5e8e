"""The head inside of other libraries' models and trainers; none of them is imported before it is asked for."""
