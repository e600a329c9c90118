"""What runs in which dtype: walks through a function, and computes nothing."""
