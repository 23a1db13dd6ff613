"""The device under test as a value, what it can do, how a vendor declares one, and what replaces what it lacks."""
