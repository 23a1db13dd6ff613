"""Facts about the installed torch that differ between versions, its private names, and fixes of its defects."""
