"""What a profile holds and how it is measured."""
