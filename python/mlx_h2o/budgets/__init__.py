"""From a size to slots and bits for each layer and head: settings, profiles, shares."""
