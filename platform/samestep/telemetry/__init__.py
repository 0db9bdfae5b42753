"""What a run tells the world. Rule: one writer; nothing here knows Ray or touches a tensor."""
