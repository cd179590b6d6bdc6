"""One layer's state machine: attention -> scores -> policy -> slots."""
