//! The server of the examples, over real sockets: what it says is what the engine says, and nobody's mistake,
//! absence or slowness is another's trouble.

#![allow(clippy::unwrap_used, reason = "a step of a test's setup that fails, fails the test")]

mod common;
#[allow(dead_code, reason = "a program of its own, of which this uses a part")]
#[path = "../examples/serve/main.rs"]
mod server;

#[path = "serve/bad_input.rs"]
mod bad_input;
#[path = "serve/client.rs"]
mod client;
#[path = "serve/connections.rs"]
mod connections;
#[path = "serve/generation.rs"]
mod generation;
#[path = "serve/lifecycle.rs"]
mod lifecycle;
#[path = "serve/limits.rs"]
mod limits;
#[path = "serve/texts.rs"]
mod texts;

// The example's own paths begin at its root.
#[allow(unused_imports, reason = "the example names them")]
use server::*;
