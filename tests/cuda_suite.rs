//! The tests of the engine once more, on an emulated GPU: the same files, with another device (`common::on_device`).
//! What "fresh" engines say is asked of the same device, so bits are equal here too.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, reason = "a test that fails says where")]
#![allow(clippy::duplicate_mod, reason = "each of the files is a test program too, with modules of its own")]

mod common;

// What the files of `updates.rs` take from its root.
#[path = "updates/changes.rs"]
mod changes;
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

#[path = "bad_input.rs"]
mod bad_input;
#[path = "concurrent.rs"]
mod concurrent;
#[path = "families.rs"]
mod families;
#[path = "in_flight.rs"]
mod in_flight;
#[path = "lifecycle.rs"]
mod lifecycle;
#[path = "loads.rs"]
mod loads;
#[path = "simulation.rs"]
mod simulation;
