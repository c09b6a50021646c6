"""Pictures and pages that show what a run achieved."""
