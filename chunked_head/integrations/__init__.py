"""The head inside of other libraries' models and trainers. Importing a module of this package imports its library."""
