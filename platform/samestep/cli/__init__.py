"""The command line. Rule: parse, call, show; what needs no terminal to be tested lies below."""
