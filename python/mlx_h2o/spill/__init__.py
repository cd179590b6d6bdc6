"""A file behind the memory: every row of a conversation, as stored, in a fixed place."""
