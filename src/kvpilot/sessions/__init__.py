"""Sessions: their tree, their life-cycle, and which chunks they still need."""
