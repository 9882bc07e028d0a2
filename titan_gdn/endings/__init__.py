"""How a run ends: at its last step, by a signal, or by an error that is told in one line."""
