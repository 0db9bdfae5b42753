"""The pure parts of the contract. Rule: no Ray, no process group, no files; same input, same bits."""
