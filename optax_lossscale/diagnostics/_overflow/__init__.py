"""Who made the inf: runs a function one operation at a time, and follows it."""
