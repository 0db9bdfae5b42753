"""The exact training engine. Rule: knows no Ray and no launcher; the same code for any worker."""
