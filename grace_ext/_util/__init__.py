"""Small parts that all others use: work arrays, random streams, units."""
