"""Programs for those who change FSDP or this suite. They need a checkout, and are no part of an installed suite."""
