"""What went wrong, in a form that outlives the run. Rule: an incident is written once, whole."""
