"""Where and how a run is launched. Rule: decides who computes, never what is computed."""
