"""Small parts that every room uses, such as the codec, isolation and clocks; they know nothing of evaluations."""
