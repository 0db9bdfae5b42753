"""State of a run on storage: everything needed to take the next step, and proof that it is whole.

Nothing here is ever unpickled, and nothing without a valid manifest exists.
"""
