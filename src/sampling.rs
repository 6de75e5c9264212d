//! Draws tokens from logits.
