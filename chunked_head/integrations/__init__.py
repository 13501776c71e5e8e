"""The head inside of other libraries' models and trainers. A library is imported with its module here, not before."""
