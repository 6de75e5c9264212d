//! Updates of loaded weights, and loads in pieces: whatever comes in whatever way, the engine holds exactly
//! that, or what it held. The oracle is a fresh engine, bit for bit. Tests are named after their case.
#![allow(clippy::unwrap_used, reason = "a test that fails says where")]

#[path = "updates/changes.rs"]
mod changes;
mod common;
#[path = "common/cycle.rs"]
mod cycle;
#[path = "updates/failures.rs"]
mod failures;
#[path = "common/faulty.rs"]
mod faulty;
#[path = "updates/formats.rs"]
mod formats;
#[path = "updates/in_place.rs"]
mod in_place;
#[path = "updates/lives.rs"]
mod lives;
#[path = "updates/support.rs"]
mod support;
#[path = "updates/whole.rs"]
mod whole;
