"""Tests on one Ray cluster of two nodes, which is started once for all of them (a package, so that it ends with the last one)."""
