//! The control half of the server of the examples, over real sockets: each dialect's calls do what they say, or say
//! why not and do nothing.

#![allow(clippy::unwrap_used, reason = "a step of a test's setup that fails, fails the test")]

mod common;
#[allow(dead_code, reason = "a program of its own, of which this uses a part")]
#[path = "../examples/serve/main.rs"]
mod server;

#[allow(dead_code, reason = "most of it is for the tests of generation")]
#[path = "serve/client.rs"]
mod client;

#[path = "serve_control/calls.rs"]
mod calls;
#[path = "serve_control/described.rs"]
mod described;
#[path = "serve_control/flows.rs"]
mod flows;
#[path = "serve_control/host.rs"]
mod host;
#[path = "serve_control/joins.rs"]
mod joins;
#[path = "serve_control/logged.rs"]
mod logged;
#[path = "serve_control/observed.rs"]
mod observed;
#[path = "serve_control/payloads.rs"]
mod payloads;
#[path = "serve_control/slow.rs"]
mod slow;
#[path = "serve_control/strict.rs"]
mod strict;
#[path = "serve_control/tags.rs"]
mod tags;
#[path = "serve_control/transactions.rs"]
mod transactions;
#[path = "serve_control/wrong_states.rs"]
mod wrong_states;

// The example's own paths begin at its root.
#[allow(unused_imports, reason = "the example names them")]
use server::*;
