"""Code that acts while an attached model runs: replaced forwards, the pass, its seeds, padding and rates."""
