"""A trained model on its way out: plain layers, its measured weights, a card, and a note in the run's folder."""
