"""Controller programs: one file per algorithm."""
