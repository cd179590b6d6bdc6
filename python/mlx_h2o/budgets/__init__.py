"""How a size becomes slots and bits for each layer and head: settings, profiles, shares."""
