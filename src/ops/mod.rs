//! Our own ops, forward and backward.
