"""Programs for people who change FSDP or this suite. They need a checkout, and are not installed with the suite."""
