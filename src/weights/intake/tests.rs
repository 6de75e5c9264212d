//! Weights that come in in any order and any split.
