"""The pure parts of the contract. Rule: no Ray, no process group, no files; just functions."""
