"""Where the rows of a layer lie: slots, packed rows, the newest tokens, the remainder."""
