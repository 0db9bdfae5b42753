"""What watches a worker while it trains. Knows no Ray and no process group."""
