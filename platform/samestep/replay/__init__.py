"""Looking back at what a run did. Rule: of a run it writes no more than an incident's report."""
