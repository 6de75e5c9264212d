//! Tests of what only the crate can see: faults of the device, addresses, accounting.
