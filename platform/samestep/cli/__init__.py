"""The command line. Rule: parse, call, show; what is worth testing without a terminal lies below."""
