"""How context-parallel ranks exchange what a linear attention layer needs: one file for each exchange."""
