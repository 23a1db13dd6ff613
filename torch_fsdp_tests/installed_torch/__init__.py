"""Facts about the installed torch that differ between versions, its private names, and other sources in memory."""
