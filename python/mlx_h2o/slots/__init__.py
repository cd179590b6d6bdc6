"""Storage of a layer's rows: slots, packed rows, the recent window, the remainder."""
