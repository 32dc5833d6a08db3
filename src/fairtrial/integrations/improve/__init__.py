"""The search for a better text of a parameter: optimizers propose, stored runs answer, the test split decides."""
