//! The emulated CUDA driver itself: what the tests of the CUDA backend rely on.
#![cfg(feature = "cuda")]
#![allow(unsafe_code, reason = "calls the driver's C API")]
#![allow(
    clippy::undocumented_unsafe_blocks,
    reason = "the driver checks what it is given, and pointers are of locals"
)]

#[path = "emulated_cuda/mod.rs"]
mod emulated_cuda;
#[path = "emulated_driver/faults.rs"]
mod faults;
#[path = "emulated_driver/graphs.rs"]
mod graphs;
#[path = "emulated_driver/ipc.rs"]
mod ipc;
#[path = "emulated_driver/memory.rs"]
mod memory;
#[path = "emulated_driver/session.rs"]
mod session;
#[path = "emulated_driver/streams.rs"]
mod streams;
