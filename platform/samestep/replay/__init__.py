"""Looking back at what a run did. Rule: reads run directories, never writes into them."""
