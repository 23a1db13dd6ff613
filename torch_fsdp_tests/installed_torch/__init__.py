"""What the installed torch is: facts that differ between its versions, and its private names."""
