"""Losses that users write: made, and checked before they are trusted."""
