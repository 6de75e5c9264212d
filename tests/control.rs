//! The lifecycle at run time: what the controller does and refuses, by the cases.
#![allow(clippy::unwrap_used, reason = "a test that fails says where")]

mod common;
#[path = "common/exact.rs"]
mod exact;
#[path = "common/faulty.rs"]
mod faulty;
#[path = "common/trace.rs"]
mod trace;

#[path = "control/aborts.rs"]
mod aborts;
#[path = "control/deadlines.rs"]
mod deadlines;
#[path = "control/failures.rs"]
mod failures;
#[path = "control/flow.rs"]
mod flow;
#[path = "control/in_flight.rs"]
mod in_flight;
#[path = "control/lives.rs"]
mod lives;
#[path = "control/model.rs"]
mod model;
#[path = "control/order.rs"]
mod order;
#[path = "control/pauses.rs"]
mod pauses;
#[path = "control/races.rs"]
mod races;
#[path = "control/readers.rs"]
mod readers;
#[path = "control/repeats.rs"]
mod repeats;
#[path = "control/streams.rs"]
mod streams;
#[path = "control/support.rs"]
mod support;
#[path = "control/table.rs"]
mod table;
#[path = "control/transactions.rs"]
mod transactions;
#[path = "control/versions.rs"]
mod versions;
