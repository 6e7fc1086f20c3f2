"""What Python does with values of all families: operators, comparisons, texts and tests of types."""
