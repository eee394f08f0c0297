"""Small parts that all other packages use: work arrays, random streams, units."""
