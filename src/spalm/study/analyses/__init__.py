"""study.analyses."""
